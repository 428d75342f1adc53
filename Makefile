# The commands of this project. README.md shows the two that matter: make demo, make test.

PYTHON ?= /usr/bin/python3
PREFIX ?= /opt/penroot
LIBDIR := $(PREFIX)/lib/penroot
PLUGIN := spank_pyxis.so
LAYERS := aufs2ovlfs mksquashovlfs
TOOLS  := unshare mount switchroot $(LAYERS)
VENV   := .venv
PYTEST := PENROOT_PREFIX=$(PREFIX) $(VENV)/bin/python -m pytest

.PHONY: help demo test unit kernel slurm attack lint repeat matrix matrix-ci matrix-vm differential bench soak test-gpu install enroot-names plugin runtime-plugin uninstall prerequisites clean

help:
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 16

demo: prerequisites ## a 2-node Slurm cluster with a registry on this machine, and an MPI job in a container on it
	@$(MAKE) --no-print-directory install
	@PENROOT_PREFIX=$(PREFIX) $(VENV)/bin/python examples/demo.py

test: prerequisites lint ## all checks and the three tiers of tests
	@$(MAKE) --no-print-directory install
	PENROOT_PREFIX=$(PREFIX) tests/all

unit kernel slurm attack: $(VENV)/done ## one tier of tests
	$(PYTEST) tests/$@

lint: $(VENV)/done ## ruff, mypy, shellcheck
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	shellcheck $$(git ls-files '*.sh'; git ls-files | xargs awk 'FNR == 1 && /^#!.*[\/ ](ba)?sh( |$$)/ { print FILENAME } { nextfile }')

repeat: $(VENV)/done ## TIMES=3 runs of TESTS=tests (all): which depend on luck
	PENROOT_PREFIX=$(PREFIX) $(VENV)/bin/python -m tests.repeat --times $(or $(TIMES),3) $(TESTS)

MATRIX = $(PYTHON) -m tests.matrix $(RELEASES:%=--release %)
matrix: prerequisites ## the tests on each of RELEASES="bookworm trixie forky" of Debian, or with the Slurm in SLURM_SOURCE=DIR
	@$(MATRIX) $(TIERS:%=--tier %) $(TESTS:%=--test %) $(SLURM_SOURCE:%=--slurm-source %)

matrix-ci: prerequisites ## of trixie and forky what is about Slurm, in ten minutes each
	@$(MATRIX) --quick

matrix-vm: prerequisites ## the tests of Slurm and of systemd in a virtual machine of RELEASES=trixie: hours without KVM
	@$(PYTHON) -m tests.matrix --vm $(patsubst %,--release %,$(or $(RELEASES),trixie)) $(TIERS:%=--tier %) $(TESTS:%=--test %)

differential: $(VENV)/done ## each line of tests/parity/lines with ours and with ENROOT=/usr/bin/enroot
	PENROOT_PREFIX=$(PREFIX) $(VENV)/bin/python -m tests.parity.differential $(ENROOT:%=--enroot %)

bench: $(VENV)/done ## ratios against peers, measured in one run
	PENROOT_PREFIX=$(PREFIX) $(VENV)/bin/python -m benchmarks

soak: $(VENV)/done ## long loops and fuzzing
	$(PYTEST) tests -m soak --soak

test-gpu: $(VENV)/done ## what needs a GPU
	$(PYTEST) tests/gpu

prerequisites:
	@tests/prerequisites

$(VENV)/done: pyproject.toml setup.py c_shims/linux_build.py $(wildcard c_shims/*.h)
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --editable '.[test]'
	@touch $@

# Python takes one argument on a #! line: -IS leaves out the caller's
# environment and site-packages, and with them most of the start-up time.
define SCRIPT
#!$(PYTHON) -IS
import sys

sys.path.insert(0, "$(LIBDIR)")
try:
    from $(1) import main
except (ImportError, OSError) as e:
    sys.exit(f"[ERROR] cannot load penroot from $(LIBDIR): {e}\n[HINT] let it be read: chmod -R a+rX; or make install")

main()
endef
export PENROOT_SCRIPT := $(call SCRIPT,enroot_py.main)
export PYXIS_SCRIPT := $(call SCRIPT,pyxis_py.cli)
export LAYERS_SCRIPT := $(call SCRIPT,enroot_py.cli.ovlfs)

install: $(VENV)/done ## into PREFIX, readable by every user, with the Slurm plugin where slurm/spank.h is
	rm -rf $(LIBDIR).new build
	$(PYTHON) -m pip install --quiet --no-warn-script-location --target $(LIBDIR).new .
	rm -rf $(LIBDIR).new/bin
	mkdir -p $(PREFIX)/bin
	# Slurm refuses every job while a plugin that it requires is missing: the old one stays until there is a new one.
	if test -e $(LIBDIR)/$(PLUGIN); then cp -p $(LIBDIR)/$(PLUGIN) $(LIBDIR).new; fi
	rm -rf $(LIBDIR).old
	if test -e $(LIBDIR); then mv $(LIBDIR) $(LIBDIR).old; fi; mv $(LIBDIR).new $(LIBDIR)
	rm -rf $(LIBDIR).old
	@printf '%s\n' "$$PENROOT_SCRIPT" > $(PREFIX)/bin/penroot
	@printf '%s\n' "$$PYXIS_SCRIPT" > $(PREFIX)/bin/pyxis-py
	chmod 755 $(PREFIX)/bin/penroot $(PREFIX)/bin/pyxis-py
	$(PYTHON) -IS -c 'import sys; sys.path.insert(0, "$(LIBDIR)"); from enroot_py.base import pack; pack.write()'
	mkdir -p $(PREFIX)/share/bash-completion/completions
	$(PREFIX)/bin/penroot completion bash > $(PREFIX)/share/bash-completion/completions/penroot
	mkdir -p $(PREFIX)/share/penroot/apparmor
	$(PREFIX)/bin/penroot manual $(PREFIX)/share/man > $(PREFIX)/share/penroot/penroot.yaml
	$(PREFIX)/bin/pyxis-py manual $(PREFIX)/share/man
	sed 's,@PREFIX@,$(PREFIX),' configs/apparmor/penroot > $(PREFIX)/share/penroot/apparmor/penroot
	$(MAKE) --no-print-directory --silent -C c_shims/helpers install LIBEXEC=$(PREFIX)/libexec/penroot
	cd $(PREFIX)/libexec/penroot && for name in $(LAYERS); do rm -f penroot-$$name && \
		printf '%s\n' "$$LAYERS_SCRIPT" > penroot-$$name && chmod 755 penroot-$$name && \
		ln -sf penroot-$$name enroot-$$name || exit 1; done
	for name in $(TOOLS); do ln -sf ../libexec/penroot/penroot-$$name $(PREFIX)/bin/penroot-$$name || exit 1; done
	chmod -R a+rX $(PREFIX)
	@if test -e /usr/include/slurm/spank.h; then $(MAKE) --no-print-directory plugin; \
	elif test -e $(LIBDIR)/$(PLUGIN); then echo '$(PLUGIN) is the old one: pyxis-py install --slurm-include DIR'; fi

enroot-names: ## links in PREFIX/bin under the names that enroot's programs have
	ln -sf penroot $(PREFIX)/bin/enroot
	for name in $(TOOLS); do ln -sf penroot-$$name $(PREFIX)/bin/enroot-$$name || exit 1; done
	ln -sf penroot-unshare $(PREFIX)/bin/enroot-nsenter
	mkdir -p $(PREFIX)/share/man/man1 $(PREFIX)/share/bash-completion/completions
	ln -sf penroot.1 $(PREFIX)/share/man/man1/enroot.1
	$(PREFIX)/bin/enroot completion bash > $(PREFIX)/share/bash-completion/completions/enroot

plugin: ## spank_pyxis.so, built against this machine's slurm/spank.h
	$(PREFIX)/bin/pyxis-py build --output $(LIBDIR)/$(PLUGIN)

runtime-plugin: ## SLURM_SOURCE=DIR, configured: a first runtime/penroot for Slurm 26.11
	@$(MAKE) --no-print-directory -C c_shims/runtime SLURM_SOURCE=$(abspath $(SLURM_SOURCE)) PYTHON=$(PYTHON) LIBDIR=$(LIBDIR)

uninstall: ## remove what install put there, and this node's line in plugstack.conf.d
	test ! -e $(PREFIX)/bin/pyxis-py || $(PREFIX)/bin/pyxis-py uninstall --prefix $(PREFIX)
	rm -rf $(LIBDIR) $(PREFIX)/libexec/penroot $(PREFIX)/share/penroot $(PREFIX)/bin/penroot $(PREFIX)/bin/pyxis-py
	rm -f $(TOOLS:%=$(PREFIX)/bin/penroot-%) $(TOOLS:%=$(PREFIX)/bin/enroot-%) $(PREFIX)/bin/enroot-nsenter
	test ! -L $(PREFIX)/bin/enroot || rm -f $(PREFIX)/bin/enroot $(PREFIX)/share/bash-completion/completions/enroot
	test ! -L $(PREFIX)/share/man/man1/enroot.1 || rm $(PREFIX)/share/man/man1/enroot.1
	rm -f $(PREFIX)/share/man/man1/penroot*.1 $(PREFIX)/share/man/man5/penroot*.5
	rm -f $(PREFIX)/share/man/man1/pyxis-py.1 $(PREFIX)/share/man/man7/penroot-srun.7
	rm -f $(PREFIX)/share/bash-completion/completions/penroot
	test -n "$$(find $(PREFIX) ! -type d -print -quit)" || rm -rf $(PREFIX)

clean:
	rm -rf build c_shims/helpers/build c_shims/runtime/build $(VENV) *.egg-info .mypy_cache .ruff_cache .pytest_cache enroot_py/base/_linux*.so enroot_py/base/_linux.c
