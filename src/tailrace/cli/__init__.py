"""The command line: `tailrace`, or `python -m tailrace`.

In: arguments. Out: text on standard output, files, and an exit code.

    command_line        `main`, and the commands about datasets, plans, tensors and processes
    look_commands       show, watch, report, compare, view: display runs
    run_commands        histogram, heatmap, tensorboard, diff: read run directories
    lookback_commands   replay, audit, bisect: re-run or check past steps
    doctor              versions, devices, optional packages, and problems
    parsers, targets    arguments that commands share; the user's objects, by MODULE:ATTRIBUTE

Rules: commands only parse and print; the work is done by functions that users can call from Python too.
They import what they need when they run, so that `--help` is fast.
"""

from tailrace.cli.command_line import main as main
