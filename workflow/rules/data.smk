# The first job of all, and not a local rule: on SLURM it must look at a GPU node, not at the login node.
rule hardware:
    output:
        touch("results/hardware.ok"),
    log:
        "logs/hardware.log",
    conda:
        "../../envs/environment.yaml"
    threads: 1
    resources:
        gres=f"gpu:{EXPERIMENT.gpus}" if EXPERIMENT.gpus else "",
        tasks_per_gpu=0,
        mem_mb=1000,
        runtime=5,
    params:
        gpus=EXPERIMENT.gpus,
        gpu_memory_gb=EXPERIMENT.gpu_memory_gb,
    message:
        "Is the hardware here that this config needs?"
    shell:
        "python -m megagraph check --gpus {params.gpus} --gpu-memory-gb {params.gpu_memory_gb} > {log} 2>&1"


rule resolve:
    input:
        ancient("results/hardware.ok"),
    output:
        "results/config/{kind}/{id}.json",
    log:
        "logs/resolve/{kind}-{id}.log",
    localrule: True
    conda:
        "../../envs/environment.yaml"
    params:
        spec=spec,
    message:
        "Configuration of {wildcards.kind} {wildcards.id}"
    shell:
        "python -m megagraph resolve {wildcards.kind} {wildcards.id} --spec {params.spec:q} --out {output} > {log} 2>&1"


rule dataset:
    input:
        "results/config/dataset/{dataset}.json",
    output:
        graph=ensure("results/data/{dataset}/graph.safetensors", non_empty=True),
        manifest=ensure("results/data/{dataset}/manifest.json", non_empty=True),
    log:
        "logs/dataset/{dataset}.log",
    localrule: True
    conda:
        "../../envs/environment.yaml"
    params:
        out=subpath(output.graph, parent=True),
    message:
        "Data set {wildcards.dataset}"
    shell:
        "python -m megagraph download {input} {wildcards.dataset} --out {params.out} > {log} 2>&1"


rule coarsen:
    input:
        graph="results/data/{dataset}/graph.safetensors",
        coarsening="results/config/coarsening/{coarsening}.json",
    output:
        "results/data/{dataset}/{coarsening}.safetensors",
    log:
        "logs/coarsen/{dataset}-{coarsening}.log",
    conda:
        "../../envs/environment.yaml"
    threads: 1
    resources:
        mem_mb=4000,
        runtime=minutes(30),
    message:
        "Coarse graph {wildcards.coarsening} of {wildcards.dataset}"
    shell:
        "python -m megagraph coarsen {input.graph} {input.coarsening} --out {output} > {log} 2>&1"
