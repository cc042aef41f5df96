# One rule for each figure and table of the config, named as in the paper: `snakemake fig8b` makes that one and what it
# needs, nothing else.
for _name in EXPERIMENT.figures:

    rule:
        name:
            _name
        input:
            figure_files(_name),
        output:
            multiext(f"results/figures/{_name}", *drawn_kinds(_name)),
            png=report(
                f"results/figures/{_name}.png",
                caption=f"../report/{_name}.rst",
                category="Tables" if _name.startswith("table") else "Figures",
                labels={"in the paper": _name},
            ),
        log:
            f"logs/figure/{_name}.log",
        localrule: True
        conda:
            "../../envs/environment.yaml"
        params:
            name=_name,
            out=subpath(output.png, parent=True),
        message:
            "Draw {params.name}"
        shell:
            "python -m megagraph figure {params.name} --results results --out {params.out} > {log} 2>&1"


rule report:
    input:
        all_results(),
        paper=PAPER_VALUES,
    output:
        md=report(
            "results/report.md",
            caption="../report/report.rst",
            category="Paper against measured",
        ),
        csv="results/report.csv",
    log:
        "logs/report.log",
    localrule: True
    conda:
        "../../envs/environment.yaml"
    message:
        "Report: the paper's numbers beside ours"
    shell:
        "python -m megagraph report --results results --paper {input.paper} --out {output.md} > {log} 2>&1"
