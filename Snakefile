# What a bare `snakemake` runs here: the paper's experiments, or those of --configfile.
# The workflow itself is workflow/Snakefile, where the workflow catalogue and `module:` look for it.
include: "workflow/Snakefile"


# An include never sets the default target: without a rule of its own, nothing would be done.
rule everything:
    default_target: True
    input:
        rules.all.input,
    localrule: True
    message:
        "All of: {config[title]}"
