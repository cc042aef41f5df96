"""Plain models; parallelism is applied from outside."""
