# Timed jobs hold the resource `measured`, of which profiles/default has one: nothing timed runs beside another.
rule profile:
    input:
        data_files,
        workload="results/config/workload/{run}.json",
    output:
        "results/search/{run}/profile.json",
    log:
        "logs/profile/{run}.log",
    conda:
        "../../envs/environment.yaml"
    threads: ranks
    resources:
        measured=1,
        mpi=mpi,
        nodes=nodes,
        tasks=ranks,
        cpus_per_task=1,
        tasks_per_gpu=0,
        gres=gres,
        mem_mb=mem_mb,
        runtime=minutes(60),
    params:
        data=data_dir,
    message:
        "Profile of {wildcards.run} on {resources.tasks} ranks"
    shell:
        "python -m megagraph launch --nodes {resources.nodes} --tasks {resources.tasks} -- "
        "profile {input.workload} --data {params.data} --out {output} > {log} 2>&1"


# One job measures a whole shard of the grid: interpreter and torch start once per shard.
rule grid:
    input:
        data_files,
        workload="results/config/workload/{run}.json",
    output:
        "results/search/{run}/grid-{shard}.csv",
    log:
        "logs/grid/{run}-{shard}.log",
    conda:
        "../../envs/environment.yaml"
    threads: 1
    resources:
        measured=1,
        cpus_per_task=1,
        tasks_per_gpu=0,
        gres=gres_of_one,
        mem_mb=mem_mb_of_one,
        runtime=minutes(120),
    params:
        data=data_dir,
        shards=lambda wildcards: run_of(wildcards).profile.grid.shards,
    message:
        "Validation grid of {wildcards.run}, shard {wildcards.shard} of {params.shards}"
    shell:
        "python -m megagraph launch --nodes 1 --tasks 1 -- profile {input.workload} --data {params.data} "
        "--grid {wildcards.shard}/{params.shards} --out {output} > {log} 2>&1"


rule heldout:
    input:
        data_files,
        workload="results/config/workload/{run}.json",
    output:
        "results/search/{run}/heldout-{shard}.csv",
    log:
        "logs/heldout/{run}-{shard}.log",
    conda:
        "../../envs/environment.yaml"
    threads: 1
    resources:
        measured=1,
        cpus_per_task=1,
        tasks_per_gpu=0,
        gres=gres_of_one,
        mem_mb=mem_mb_of_one,
        runtime=minutes(120),
    params:
        data=data_dir,
        shards=lambda wildcards: run_of(wildcards).profile.heldout.shards,
    message:
        "Held-out grid of {wildcards.run}, shard {wildcards.shard} of {params.shards}"
    shell:
        "python -m megagraph launch --nodes 1 --tasks 1 -- profile {input.workload} --data {params.data} "
        "--heldout {wildcards.shard}/{params.shards} --out {output} > {log} 2>&1"


rule fit:
    input:
        profile="results/search/{run}/profile.json",
        grid=lambda wildcards: grid_files(wildcards.run),
        heldout=lambda wildcards: heldout_files(wildcards.run),
        profiles=lambda wildcards: heldout_profiles(wildcards.run),
    output:
        "results/search/{run}/cost.json",
    log:
        "logs/fit/{run}.log",
    localrule: True
    conda:
        "../../envs/environment.yaml"
    params:
        heldout=lambda wildcards, input: [
            *(["--heldout", *input.heldout] if input.heldout else []),
            *(["--heldout-profile", *input.profiles] if input.profiles else []),
        ],
    message:
        "Cost model of {wildcards.run}"
    shell:
        "python -m megagraph fit {input.profile} {input.grid} {params.heldout} --out {output} > {log} 2>&1"


rule search:
    input:
        workload="results/config/workload/{run}.json",
        cost="results/search/{run}/cost.json",
    output:
        "results/search/{run}/search.json",
    log:
        "logs/search/{run}.log",
    localrule: True
    conda:
        "../../envs/environment.yaml"
    message:
        "Search for the plan of {wildcards.run}"
    shell:
        "python -m megagraph search {input.workload} {input.cost} --out {output} > {log} 2>&1"


rule plans:
    input:
        data_files,
        workload="results/config/workload/{run}.json",
        search="results/search/{run}/search.json",
    output:
        "results/search/{run}/plans.csv",
    log:
        "logs/plans/{run}.log",
    conda:
        "../../envs/environment.yaml"
    threads: ranks
    resources:
        measured=1,
        mpi=mpi,
        nodes=nodes,
        tasks=ranks,
        cpus_per_task=1,
        tasks_per_gpu=0,
        gres=gres,
        mem_mb=mem_mb,
        runtime=minutes(60),
    params:
        data=data_dir,
    message:
        "Measured plans of {wildcards.run} on {resources.tasks} ranks"
    shell:
        "python -m megagraph launch --nodes {resources.nodes} --tasks {resources.tasks} -- "
        "profile {input.workload} --data {params.data} --plans {input.search} --out {output} > {log} 2>&1"
