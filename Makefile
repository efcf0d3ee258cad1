# make demo   install, write the tiny checkpoint, serve it until it is interrupted
# make call   play the shipped recording to the tiny checkpoint as a call, write out.wav; no server needed
# make test   install what the tests need and run them all
# make browser   for the tests of the page: Debian's chromium, unless there is a browser
# make bench  one hour of call on the tiny checkpoint: first and last hundred units

PYTHON ?= python3
# The build that the figures in docs/numbers.md were measured with. On a GPU machine install the CUDA build first.
TORCH ?= torch==2.13.0
BIN := .venv/bin

PORT ?= 8000

.PHONY: demo call test browser bench clean

demo: build/tiny
	exec $(BIN)/antiphon serve --model build/tiny --max-calls 8 --port $(PORT)

call: build/tiny
	$(BIN)/antiphon run examples/caller.flac -o out.wav --model build/tiny --high 400 --low 300

test: .venv/installed-test browser
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest

# Playwright's own browsers are not needed.
browser:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || { \
		sudo=$$(test "$$(id -u)" = 0 || echo sudo); \
		$$sudo apt-get update -q && $$sudo apt-get install -y -q --no-install-recommends chromium; }

bench: build/tiny
	$(BIN)/antiphon bench soak --unpaced --weights build/tiny --seconds 3600 --out build/bench

# Anew each time: what writes it may have changed.
.PHONY: build/tiny
build/tiny: .venv/installed
	rm -rf build/tiny
	$(BIN)/antiphon tiny build/tiny

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --editable .
	touch $@

.venv/installed-test: .venv/installed
	$(BIN)/pip install --quiet --editable .[test]
	touch $@

clean:
	rm -rf .venv build out.wav
