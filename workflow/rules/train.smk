# Snakemake removes the outputs of a job that failed or runs again, not checkpoint/, which is none: the verb tells
# whether that is of this very run.
rule train:
    input:
        data_files,
        run="results/config/run/{run}.json",
        plan=plan_file,
    output:
        summary="results/train/{run}/summary.json",
        epochs="results/train/{run}/epochs.csv",
    log:
        "logs/train/{run}.log",
    conda:
        "../../envs/environment.yaml"
    # Cores taken from the local pool; on SLURM cpus_per_task counts.
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
        runtime=minutes(24 * 60),
    params:
        data=data_dir,
        out=subpath(output.summary, parent=True),
        plan=lambda wildcards, input: f"--plan {input.plan}" if input.plan else "",
    message:
        "Train {wildcards.run} on {resources.tasks} ranks"
    shell:
        "python -m megagraph launch --nodes {resources.nodes} --tasks {resources.tasks} -- "
        "train {input.run} --data {params.data} {params.plan} --out {params.out} --resume auto > {log} 2>&1"
