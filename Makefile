# The one command surface; CI calls it too.

CARGO ?= cargo
TARGET := $(or $(CARGO_TARGET_DIR),target)
LAB = "$(PROGRAMS)/margay-lab"
PROGRAMS ?= $(TARGET)/release
DESTDIR ?=
PREFIX ?= /usr/local

# The Makefiles of libbpf and of sdk/c cannot build below a path with a space: what they make lies elsewhere then.
ifneq ($(words $(CURDIR))$(words $(TARGET)),11)
export CARGO_BUILD_BUILD_DIR ?= $(HOME)/.cache/margay-build
endif
SDK_C := $(or $(CARGO_BUILD_BUILD_DIR),$(abspath $(TARGET)))/sdk-c

.PHONY: help build demo test check test-long verify bench figures reference fmt lint setup setup-apps apps install \
	uninstall

help: ## name the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

build: ## build the program, the proxy for memcached, the lab and the checker
	$(CARGO) build --release --locked -p margay -p margay-lab -p margay-memcached -p margay-sim

demo: setup build ## show the main job on real programs, as root or not
	@$(LAB) demo

test: ## everything that must hold; ends with "N passed, N failed"
	@scripts/test

check: ## what one runs while working: format, lints, unit tests, simulator; minutes less than `make test`
	@scripts/test --quick

test-long: ## what takes longer: more seeds, larger worlds, every scenario three times
	@scripts/test --long

verify: setup build ## search the models and the code of the protocol in full, in the large sizes
	@MARGAY_LAB_LONG=1 $(LAB) run model

bench: setup build ## comparisons that run both sides in one run
	@status=0; for scenario in direct-throughput round-trips setup-latency encap-throughput secure-throughput multipath \
		router-rate router-throughput datagram-rate stack-throughput; do \
		$(LAB) run $$scenario || status=1; done; exit $$status

figures: setup-apps build ## run every scenario at full length and write docs/figures
	@$(LAB) figures --out docs/figures

reference: ## write the reference pages of the book from the program
	MARGAY_REFERENCE=write $(CARGO) test --locked -p margay --bin margay reference::

fmt: ## format the code
	$(CARGO) fmt --all

lint: ## formatting and lints, as CI wants them
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	@if $(CARGO) deny --version >/dev/null 2>&1; then $(CARGO) deny check licenses bans sources; \
	else echo "lint: cargo-deny is not installed; licences and sources of dependencies were not checked"; fi

setup: ## install what build, tests and demo need (Debian, root)
	@scripts/setup

setup-apps: ## as setup, with the applications that the scenario `apps` uses (large)
	@scripts/setup apps

apps: setup-apps build ## use packaged applications by a service's name
	@$(LAB) run apps

install: build ## install the program, its systemd unit and shell completions, and the C library
	$(MAKE) -C sdk/c all BUILD="$(SDK_C)" PREFIX="$(PREFIX)"
	scripts/install-files "$(PROGRAMS)" "$(SDK_C)" "$(DESTDIR)" "$(PREFIX)"

uninstall: ## take away what `make install` put in place, and nothing else
	scripts/install-files --uninstall "$(DESTDIR)" "$(PREFIX)"
