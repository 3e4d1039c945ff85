# Two commands are enough: `make demo` and `make test`. Both set everything up first.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
FILES  ?= 50000
FOLDERS ?= 5000
SEED   ?= 0
JOBS   ?= 2
EXTRAS := fast,train,compress,text,hf,onnx,serve,view,yardsticks,distributed,docs,dev

.PHONY: help install demo test check docs release-check fuzz format bench paper experiments queue clean

help:
	@echo "make demo     three tasks on generated data, compared with alternatives of the same size (a minute)"
	@echo "make test     the whole test suite"
	@echo "make check    formatting, lint, types, import layers"
	@echo "make docs     the documentation site in build/site; no dead link, nothing loaded from elsewhere"
	@echo "make release-check  wheel and sdist, installed into clean environments and tried there"
	@echo "make fuzz     $(FILES) corrupted files on both engines, $(FOLDERS) corrupted folders (an hour on 2 cores; FILES=, SEED=, JOBS=)"
	@echo "make bench    speed against torch, side by side"
	@echo "make experiments  every published table and study of research/, and whether it has results"
	@echo "make paper    run one: NAME=ant/table14 [SIZE=quick|small|full] [SEEDS=0,1,2] [ROWS=dense,ant-29k]"
	@echo "make queue    run what research/queue.toml plans and has no results yet, on one thread"
	@echo "make install  the environment in $(VENV), with every extra"

install: $(READY)

$(READY): pyproject.toml constraints.txt
	@echo "[1/3] making the environment in $(VENV)"
	@command -v $(PYTHON) >/dev/null && $(PYTHON) -m venv $(VENV) || python3 -m venv $(VENV)
	@echo "[2/3] installing featherbed and what it needs (torch is the large one: a few minutes on a fresh machine)"
	@$(BIN)/pip install -qq --disable-pip-version-check -c constraints.txt -e ".[$(EXTRAS)]"
	@case "$$(uname -sm)" in "Linux x86_64") $(BIN)/pip install -qq --disable-pip-version-check --no-deps -c constraints.txt torchrec;; esac
	@echo "[3/3] checking that it imports"
	@$(BIN)/python -c "import featherbed, torch; print('featherbed', featherbed.__version__, 'with torch', torch.__version__)"
	@touch $(READY)

demo: $(READY)
	@$(BIN)/featherbed demo

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/ruff check --select E501 --config lint.pycodestyle.max-line-length=100 src
	$(BIN)/mypy
	$(BIN)/mypy --strict tests/typing/public_api.py
	$(BIN)/python -m pytest tests/test_layers.py tests/test_structure.py tests/test_site.py

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "open build/site/index.html"

release-check: $(READY)
	$(BIN)/python release/check.py $(if $(PYTHONS),--pythons "$(PYTHONS)")

fuzz: $(READY)
	$(BIN)/python tests/fuzz/run.py --files $(FILES) --seed $(SEED) --jobs $(JOBS)
	$(BIN)/python tests/fuzz/folders.py --files $(FOLDERS) --seed $(SEED) --jobs $(JOBS)

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)
	$(BIN)/python benchmarks/lookup.py

paper: $(READY)
	$(BIN)/python -m research run "$(NAME)" $(if $(SIZE),--size "$(SIZE)") $(if $(SEEDS),--seeds "$(SEEDS)") $(if $(ROWS),--rows "$(ROWS)")

experiments: $(READY)
	@$(BIN)/python -m research list

queue: $(READY)
	nice -n 19 $(BIN)/python -m research queue

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache
