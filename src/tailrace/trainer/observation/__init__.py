"""What becomes of the results of executions: history, records, run directories, bundles of bad ones.

In: `Results`, in the order of the executions. Out: a `Journal` with history and records, and files.

    journal             the one place that results go to; front ends use it too
    logged_values       additional columns of the history
    nonfinite_guard     after a guard stopped an execution: back to the state before, and why
    bundles             the step that it stopped at, in a directory
    description, monitoring   what runs, for a run directory; whether a value has improved

Rule: nothing here dispatches, except the guard, which runs the steps before a bad one again.
"""
