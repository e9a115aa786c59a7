# `make run` serves, `make test` tests. Both need no preparation and can be interrupted and repeated.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Errors alone: with an index of many mirrors pip's warnings would fill the screen before the banner.
INSTALL := -m pip install --quiet --quiet --disable-pip-version-check
GOLDENS := build/goldens-venv
CLIENTS := build/clients-venv
NODE_CLIENTS := build/clients-node
HEAVY_CLIENTS := build/clients-heavy
HEAVY := aider crewai semantic-kernel
VLLM := build/vllm-venv
DYNAMO := build/dynamo-venv
DYNAMO_VERSION := 1.6.1
RAY := build/ray-venv
TORCH := torch==2.13.0
TRITON := triton==3.9.0; sys_platform == "linux" and platform_machine == "x86_64"
PEFT := peft==0.21.2
# What `make test-torch` runs over torch in place of OpenVINO, as it depends on the runtime: runners, the hand-over of
# their blocks, the map of their caches, and of OpenAI's API the answers, whose tokens they draw.
ON_TORCH := $(addprefix tests/engine/runners/test_,adapters.py architectures.py block_copies.py draft_model.py \
  isolation.py loading.py runner.py) tests/engine/fleet/test_handover_live.py tests/gateway/front/http/test_live.py \
  $(addprefix tests/gateway/api/openai/test_,choices.py completions.py constraints.py fields.py logprobs.py) \
  tests/pipelines/llm/test_offline.py tests/triton/test_seeds.py
MINUTES := 10
N := 20
# Each property has its share of the minutes. The log has thousands of refusals, and nothing of the one that failed.
FUZZ := -n auto --dist load --show-capture=no
# tests/conftest.py chooses the number of workers (another: ARGS="-n 8") and the order of the files.
PARALLEL := -n auto --dist loadfile --no-loadscope-reorder

# The suite starts hundreds of processes, and each would compile every module anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help run test test-long quick prove explore fuzz soak test-torch test-clients test-clients-heavy test-vllm test-on-vllm test-dynamo test-ray test-gpu bench-gpu gpu-kit check format docs console vectors bench goldens clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

run: $(VENV)/.serve ## serve the bundled model; flags: make run ARGS="--http-port 9000"
	@exec $(BIN)/sluice serve $(ARGS)

test: $(VENV)/.dev ## the test suite; one part: make test ARGS="tests/engine -k cancel"
	$(BIN)/python -m pytest $(PARALLEL) -m "not long and not torch" $(ARGS)

test-long: $(VENV)/.dev ## what the suite leaves out: faults at length, every family in every type, browsers
	$(BIN)/python -m pytest $(PARALLEL) -m "long and not torch" $(ARGS)

quick: $(VENV)/.dev ## the tests that start no process and no model library and take no time, in a minute
	$(BIN)/python -m pytest $(PARALLEL) --quick $(ARGS)

prove: $(VENV)/.dev ## the suite N=20 times beside four busy processes, and what failed in any run
	$(BIN)/python -m tests.tools.repeat $(N) $(ARGS)

explore: $(VENV)/.dev ## the property tests with 1,000 new examples each; what fails is kept in .hypothesis and tried first
	$(BIN)/python -m pytest $(PARALLEL) -m "hypothesis and not torch" --hypothesis-profile=explore $(ARGS)

soak: $(VENV)/.dev ## ten minutes of faults under traffic; longer: make soak HOURS=8, or MINUTES=30 ARGS="--seed 7"
	$(BIN)/python -m sluice.load.chaos --minutes $(if $(HOURS),$$(($(HOURS) * 60)),$(MINUTES)) $(ARGS)

test-torch: $(VENV)/.torch ## the torch runtime, and comparisons with transformers on fresh weights (installs torch)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m torch $(ARGS)
	$(BIN)/python -m pytest --on-torch $(PARALLEL) -m "not torch" --timeout=300 $(ON_TORCH) $(ARGS)

IN_CLIENTS := cd tests/clients && ../../$(CLIENTS)/bin/python -m pytest --rootdir . --confcutdir . -c pytest.ini

test-clients: $(VENV)/.torch $(CLIENTS)/.done $(NODE_CLIENTS)/.done ## frameworks, agents and tools of others against a running server (2.1 GB in build/)
	$(IN_CLIENTS) -m "not heavy" $(or $(ARGS),.)

test-clients-heavy: $(VENV)/.dev $(CLIENTS)/.done $(HEAVY_CLIENTS)/.done ## Aider, Cline, Continue, CrewAI and Semantic Kernel (2.1 GB more)
	$(IN_CLIENTS) -m heavy $(or $(ARGS),.)

test-vllm: $(VENV)/.dev $(VLLM)/.done ## models on the vLLM runtime, on the CPU (3.2 GB in build/)
	$(BIN)/python -m pytest -m vllm -n 2 --dist loadfile --timeout=600 tests/vllm $(ARGS)

test-on-vllm: $(VENV)/.dev $(VLLM)/.done ## the gateway's tests of a language model, over vLLM
	$(BIN)/python -m pytest --on-vllm --timeout=400 tests/gateway/front/http tests/gateway/api tests/gateway/answers $(ARGS)

test-dynamo: $(VENV)/.dev $(DYNAMO)/.done ## two workers under NVIDIA Dynamo's front end and router (0.9 GB in build/)
	$(BIN)/python -m pytest -m dynamo --timeout=400 tests/dynamo $(ARGS)

test-ray: $(RAY)/.done ## a fleet of engines on Ray clusters of several nodes, all of this machine (0.9 GB in build/)
	$(RAY)/bin/python -m pytest -m ray --timeout=400 tests/ray $(ARGS)

test-gpu: $(VENV)/.torch ## on a machine with an NVIDIA GPU: a table of what is shown there, in nine minutes
	$(BIN)/python -m pytest -m gpu tests/gpu $(ARGS)

fuzz: $(VENV)/.dev ## garbage into every input for MINUTES=10; what fails is kept in build/fuzz and tried first
	SLUICE_FUZZ_MINUTES=$(MINUTES) $(BIN)/python -m pytest $(FUZZ) tests/fuzz $(ARGS)

check: $(VENV)/.dev ## format, lint, types, import layering
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layering.py

format: $(VENV)/.dev ## format the code and fix what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.docs ## write the generated tables, build the documentation's site into build/site
	$(BIN)/python -m tests.tools.drawings
	$(BIN)/python -m tests.tools.generated_docs --measure
	$(BIN)/python -m tests.tools.site_pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "build/site/index.html"

console: console/node_modules/.done ## build the console's pages, checked in as gateway/watch/console/static (needs npm)
	cd console && npm run --silent check && npm run --silent build

vectors: $(VENV)/.dev ## encode the documentation for gateway/documentation.npz, when a tenth of it has changed
	$(BIN)/python -m training.sentence_encoder.documentation

bench: $(VENV)/.dev ## the figures of docs/performance.md; some: make bench ARGS="serving executor"
	$(BIN)/python -m benchmarks $(ARGS)

# A kit brings what its machine's Python lacks; there is no network to install more.
bench-gpu: $(if $(wildcard wheels),,$(VENV)/.torch) ## measure on an NVIDIA GPU (about six minutes); some: make bench-gpu ARGS="--parts decoder"
	$(if $(wildcard wheels),$(PYTHON),$(BIN)/python) -m benchmarks.gpu $(ARGS)

gpu-kit: $(VENV)/.dev ## what such a machine without a network needs for that, in build/gpu-kit (under 50 MiB)
	$(BIN)/python -m benchmarks.gpu.kit $(ARGS)

goldens: $(GOLDENS)/.done ## record the expected tokens again, from transformers
	$(GOLDENS)/bin/python -m tests.goldens.record
	$(GOLDENS)/bin/python -m tests.goldens.record_families

clean: ## remove everything that make has made
	rm -rf $(VENV) build dist

# A stamp is written when its install is complete, so an interrupted install is repeated.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Sluice needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.serve: pyproject.toml | $(VENV)/.made
	@echo "Installing Sluice into $(VENV) (about 650 MB, once; a minute or a few) ..."
	@$(BIN)/python $(INSTALL) --editable '.[load,rag,tokenizers]'
	@touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/.made
	@echo "Installing Sluice and its test tools into $(VENV) (once; a minute or a few) ..."
	@$(BIN)/python $(INSTALL) --editable '.[dev]'
	@touch $@ $(VENV)/.serve

$(VENV)/.docs: pyproject.toml | $(VENV)/.dev
	@$(BIN)/python $(INSTALL) --editable '.[docs]'
	@touch $@

# torch for CUDA brings the Triton that fits it, torch for CPUs none (286 MB, 1 GB installed).
$(VENV)/.torch: $(VENV)/.dev
	@$(BIN)/python $(INSTALL) $(TORCH)
	@$(BIN)/python $(INSTALL) $(PEFT)
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/python $(INSTALL) '$(TRITON)'
	@touch $@

# uv finds versions that fit each other in seconds; pip looks for them for ten minutes.
$(CLIENTS)/.done: tests/clients/requirements.lock
	@echo "Installing others' clients into $(CLIENTS) (about 1.3 GB, once; a minute or a few) ..."
	@$(PYTHON) -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python $(INSTALL) uv
	@$(CLIENTS)/bin/uv pip install --quiet --python $(CLIENTS)/bin/python -r tests/clients/requirements.lock
	@touch $@

# npm ci wants the packages of all platforms. The programs' install scripts put one platform's executable in place, of
# OpenCode beside two copies.
$(NODE_CLIENTS)/.done: $(wildcard tests/clients/node/*)
	@echo "Installing others' Node programs into $(NODE_CLIENTS) (about 0.9 GB, once; a minute or a few) ..."
	@mkdir -p $(NODE_CLIENTS) && cp tests/clients/node/* $(NODE_CLIENTS)
	@cd $(NODE_CLIENTS) && npm install --silent --ignore-scripts --no-audit --no-fund
	@cd $(NODE_CLIENTS)/node_modules && node @anthropic-ai/claude-code/install.cjs \
	  && node opencode-ai/postinstall.mjs && rm -rf opencode-linux-*
	@touch $@

# Each pins what the others cannot have.
$(HEAVY_CLIENTS)/.done: $(wildcard tests/clients/heavy/*.txt tests/clients/heavy/node/*) | $(CLIENTS)/.done
	@echo "Installing more of others' programs into $(HEAVY_CLIENTS) (about 2.1 GB, once; some minutes) ..."
	@for each in $(HEAVY); do $(CLIENTS)/bin/uv venv --quiet --clear --python $(PYTHON) $(HEAVY_CLIENTS)/$$each \
	  && $(CLIENTS)/bin/uv pip install --quiet --python $(HEAVY_CLIENTS)/$$each/bin/python -r tests/clients/heavy/$$each.txt \
	  || exit 1; done
	@mkdir -p $(HEAVY_CLIENTS)/node && cp tests/clients/heavy/node/* $(HEAVY_CLIENTS)/node
	@cd $(HEAVY_CLIENTS)/node && npm install --silent --ignore-scripts --no-audit --no-fund
	@touch $@

$(VLLM)/.done: engine/delegated/vllm/runtime.py | $(VENV)/.dev
	@$(BIN)/sluice runtime install vllm --device cpu --folder $(VLLM) --force
	@touch $@

# The whole of ai-dynamo needs packages that are on no public index; its Python part needs none of them here.
$(DYNAMO)/.done: pyproject.toml
	@echo "Installing NVIDIA Dynamo beside Sluice into $(DYNAMO) (about 0.9 GB, once; a minute or a few) ..."
	@$(PYTHON) -m venv $(DYNAMO)
	@$(DYNAMO)/bin/python $(INSTALL) uv
	@$(DYNAMO)/bin/uv pip install --quiet --python $(DYNAMO)/bin/python --editable '.[dynamo]'
	@$(DYNAMO)/bin/uv pip install --quiet --python $(DYNAMO)/bin/python --no-deps ai-dynamo==$(DYNAMO_VERSION)
	@touch $@

# Ray's clusters live in the process of the tests.
$(RAY)/.done: pyproject.toml
	@echo "Installing Ray beside Sluice into $(RAY) (about 0.9 GB, once; a minute or a few) ..."
	@$(PYTHON) -m venv $(RAY)
	@$(RAY)/bin/python $(INSTALL) uv
	@$(RAY)/bin/uv pip install --quiet --python $(RAY)/bin/python --editable '.[ray]' \
	  'hypothesis<7' 'psutil<8' 'pytest<10' 'pytest-asyncio<2' 'pytest-timeout<3'
	@touch $@

console/node_modules/.done: console/package-lock.json
	cd console && npm ci --silent --no-audit --no-fund
	@touch $@

$(GOLDENS)/.done: pyproject.toml
	$(PYTHON) -m venv $(GOLDENS)
	$(GOLDENS)/bin/python $(INSTALL) $(TORCH) 'transformers>=5,<6' safetensors numpy msgspec
	touch $@
