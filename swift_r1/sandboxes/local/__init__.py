"""The provider `local`: namespaces of this machine, without root and without a daemon (docs/sandbox.md).

`sandbox.py` is the outside. It starts one Python process, of which all others are forks: `supervisor.py` is their life,
`rootfs.py` their mounts, `command.py` what runs for a caller, `processes.py` how much that takes.
"""
