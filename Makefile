# The commands of this project. README.md shows the two that matter: make demo, make test.

PYTHON ?= /usr/bin/python3
PREFIX ?= /opt/penroot
LIBDIR := $(PREFIX)/lib/penroot
ifeq ($(PREFIX),)
$(error PREFIX is empty: leave it out, or say where to install)
endif
# LIBDIR is a link to one of these: enroot_py/base/versions.py.
VERSIONS := $(PREFIX)/lib/penroot-versions
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' enroot_py/__init__.py)
PLUGIN := spank_pyxis.so
LAYERS := aufs2ovlfs mksquashovlfs
TOOLS  := unshare mount switchroot $(LAYERS)
VENV   := .venv
PYTEST := PENROOT_PREFIX=$(PREFIX) $(VENV)/bin/python -m pytest

.PHONY: dev check version libexec around packages packages-test packages-ci release help demo test unit kernel slurm attack lint docs docs-test repeat matrix matrix-ci matrix-vm differential bench soak test-gpu install enroot-names plugin runtime-plugin uninstall prerequisites clean

help:
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 16

demo: prerequisites ## a 2-node Slurm cluster with a registry on this machine, and an MPI job in a container on it
	@$(MAKE) --no-print-directory install $(VENV)/done
	@PENROOT_PREFIX=$(PREFIX) $(VENV)/bin/python examples/demo.py

dev: $(VENV)/run $(if $(wildcard /usr/include/slurm/spank.h),$(PLUGIN)) ## make bin/penroot and bin/pyxis-py run this source tree
	@$(MAKE) --no-print-directory --silent libexec NEW=$(CURDIR) LIBDIR=$(CURDIR)
	@for name in $(TOOLS); do ln -sf ../libexec/penroot-$$name bin/penroot-$$name || exit 1; done

# A tree that only its owner can enter has no plugin: jobs run what the plugin starts as their users.
$(PLUGIN): $(VENV)/run $(wildcard c_shims/*.h c_shims/spank/*.[ch]) pyxis_py/request/options.py pyxis_py/admin/header.py enroot_py/base/filter.py
	@bin/pyxis-py build --python $(PYTHON) --output $(CURDIR)/$@ || true

check: $(VENV)/done ## ruff, mypy, clang-format, hadolint, shellcheck and the tests that need nothing else: a minute
	@$(MAKE) --no-print-directory --jobs=2 --output-sync lint unit

test: prerequisites $(VENV)/done ## all checks and all tiers of tests, of an installation in PREFIX
	@$(MAKE) --no-print-directory --jobs=2 --output-sync lint install EXTRAS=ssh,signatures,swarm
	PENROOT_PREFIX=$(PREFIX) tests/all

unit: $(VENV)/done ## the tests that need no compiler, no Slurm and no root
	TMPDIR=$(firstword $(wildcard /dev/shm /tmp)) $(VENV)/bin/python -m pytest tests/unit --numprocesses 3 --dist worksteal

kernel slurm attack: dev $(VENV)/done ## one tier of tests, of this source tree or of the installation in PENROOT_PREFIX
	$(VENV)/bin/python -m pytest tests/$@

lint: $(VENV)/done ## ruff, mypy, clang-format, hadolint, shellcheck
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/clang-format --dry-run -Werror $$(git ls-files '*.[ch]')
	$(VENV)/bin/hadolint $$(git ls-files '*Dockerfile*')
	shellcheck $$(git ls-files '*.sh'; git ls-files | xargs awk 'FNR == 1 && /^#!.*[\/ ](ba)?sh( |$$)/ { print FILENAME } { nextfile }')

# -W: a link that leads nowhere and a page that no list names fail.
docs: $(VENV)/docs ## the pages of docs/ that are made of the source, and a site of all in site/index.html
	$(VENV)/bin/python -m tests.docs
	rm -rf site
	$(VENV)/bin/sphinx-build --quiet --fail-on-warning --keep-going --conf-dir docs --doctree-dir build/doctrees . site

docs-test: docs ## looks at the site in a browser without a network
	@tests/prerequisites chromium fonts-dejavu-core
	$(PYTEST) tests/docs

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

# What runs the source tree, and the module in C. What builds it is installed here once, and not for each build.
$(VENV)/run: pyproject.toml setup.py c_shims/linux_build.py enroot_py/base/filter.py $(wildcard c_shims/*.h)
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet 'setuptools>=68' 'cffi>=1.15'
	$(VENV)/bin/pip install --quiet --no-build-isolation --editable .
	@touch $@

$(VENV)/done: $(VENV)/run
	$(VENV)/bin/pip install --quiet --no-build-isolation --editable '.[test,ssh,signatures,swarm]'
	@touch $@

$(VENV)/docs: $(VENV)/done
	$(VENV)/bin/pip install --quiet --editable '.[docs]'
	@touch $@

# Python takes one argument on a #! line: -IS leaves out the caller's
# environment and site-packages, and with them most of the start-up time.
launcher = sed -e 's,@PYTHON@,$(PYTHON),' -e 's,@LIBRARY@,$(LIBDIR),' -e 's,@MODULE@,$(1),' configs/launcher > $(2).new && \
	chmod 755 $(2).new && mv -f $(2).new $(2)
# Where files are put before a package takes them to PREFIX; what runs here runs from the modules in NEW.
ROOT := $(DESTDIR)$(PREFIX)
NEW  ?= $(ROOT)/lib/penroot
from = $(PYTHON) -IS -c 'import sys; sys.path.insert(0, "$(NEW)"); sys.argv[0] = "$(1)"; $(2)'
run  = $(call from,$(2),from $(1) import main; main())

install: ## into PREFIX, readable by every user, with the Slurm plugin if slurm/spank.h exists; EXTRAS=ssh,signatures,swarm
	rm -rf build
	mkdir -p $(PREFIX)/bin $(VERSIONS)
	@new=$$(mktemp -d $(VERSIONS)/$(VERSION)-XXXXXX) && chmod 755 $$new && { $(MAKE) --no-print-directory NEW=$$new version || { rm -rf $$new; exit 1; }; }

version: # all of it in NEW, which LIBDIR leads to when it is whole
	PENROOT_BUILD="make install" $(PYTHON) -m pip install --quiet --no-compile --no-warn-script-location --target $(NEW) '.$(EXTRAS:%=[%])'
	$(PYTHON) -m packages.library $(NEW)
	@$(MAKE) --no-print-directory libexec
	$(call from,packing,from enroot_py.base import packing; packing.write())
	# Slurm refuses every job while a plugin that it requires is missing: the old one stays until there is a new one.
	@if test -e /usr/include/slurm/spank.h; then $(MAKE) --no-print-directory plugin; \
	elif test -e $(LIBDIR)/$(PLUGIN); then cp -pL $(LIBDIR)/$(PLUGIN) $(NEW) && \
		echo '$(PLUGIN) is the old one: pyxis-py install --slurm-include DIR'; fi
	chmod -R a+rX $(NEW)
	@$(MAKE) --no-print-directory around
	chmod -R a+rX $(PREFIX)/bin $(PREFIX)/libexec $(PREFIX)/share
	$(call from,versions,from enroot_py.base import versions; versions.use())

libexec: # the programs that are no modules, and those of hooks, beside the modules in NEW
	$(MAKE) --no-print-directory --silent -C c_shims/helpers install LIBEXEC=$(NEW)/libexec
	@for name in $(TOOLS); do tool=$(NEW)/libexec/penroot-$$name && \
		case " $(LAYERS) " in *" $$name "*) module=ovlfs ;; *) module=tools ;; esac && \
		$(call launcher,enroot_py.cli.'$$module',$$tool) && ln -sf penroot-$$name $(NEW)/libexec/enroot-$$name || exit 1; done
	ln -sf penroot-unshare $(NEW)/libexec/enroot-nsenter

around: # the modules: programs, manual pages, completion, the AppArmor profile
	mkdir -p $(ROOT)/bin $(ROOT)/libexec/penroot $(ROOT)/share/bash-completion/completions $(ROOT)/share/penroot/apparmor
	@$(call launcher,enroot_py.main,$(ROOT)/bin/penroot)
	@$(call launcher,pyxis_py.admin.cli,$(ROOT)/bin/pyxis-py)
	@$(call run,enroot_py.main,penroot) completion bash > $(ROOT)/share/bash-completion/completions/penroot
	@$(call run,enroot_py.main,penroot) manual $(ROOT)/share/man > $(ROOT)/share/penroot/penroot.yaml
	@$(call run,pyxis_py.admin.cli,pyxis-py) manual $(ROOT)/share/man
	sed 's,@PREFIX@,$(PREFIX),' configs/apparmor/penroot > $(ROOT)/share/penroot/apparmor/penroot
	@for path in $(NEW)/libexec/*; do name=$${path##*/} && ln -sf ../../lib/penroot/libexec/$$name $(ROOT)/libexec/penroot/$$name || exit 1; done
	for name in $(TOOLS); do ln -sf ../libexec/penroot/penroot-$$name $(ROOT)/bin/penroot-$$name || exit 1; done

enroot-names: ## links in PREFIX/bin under the names that enroot's programs have
	ln -sf penroot $(ROOT)/bin/enroot
	for name in $(TOOLS); do ln -sf penroot-$$name $(ROOT)/bin/enroot-$$name || exit 1; done
	ln -sf penroot-unshare $(ROOT)/bin/enroot-nsenter
	mkdir -p $(ROOT)/share/man/man1 $(ROOT)/share/bash-completion/completions
	ln -sf penroot.1 $(ROOT)/share/man/man1/enroot.1
	@$(if $(DESTDIR),$(call run,enroot_py.main,enroot),$(PREFIX)/bin/enroot) completion bash > $(ROOT)/share/bash-completion/completions/enroot

plugin: ## spank_pyxis.so, built against this machine's slurm/spank.h
	@$(PYTHON) -IS -c 'import sys; sys.path.insert(0, "$(NEW)"); sys.argv = ["pyxis-py", "build", "--output", "$(NEW)/$(PLUGIN)"]; from pyxis_py.admin.cli import main; main()'

runtime-plugin: ## SLURM_SOURCE=DIR, configured: a first runtime/penroot for Slurm 26.11
	@$(MAKE) --no-print-directory -C c_shims/runtime SLURM_SOURCE=$(abspath $(SLURM_SOURCE)) PYTHON=$(PYTHON) LIBDIR=$(LIBDIR)

uninstall: ## remove what install put there, and this node's line in plugstack.conf.d
	test ! -e $(PREFIX)/bin/pyxis-py || $(PREFIX)/bin/pyxis-py uninstall --prefix $(PREFIX)
	rm -rf $(LIBDIR) $(VERSIONS) $(PREFIX)/libexec/penroot $(PREFIX)/share/penroot $(PREFIX)/bin/penroot $(PREFIX)/bin/pyxis-py
	rm -f $(TOOLS:%=$(PREFIX)/bin/penroot-%) $(TOOLS:%=$(PREFIX)/bin/enroot-%) $(PREFIX)/bin/enroot-nsenter
	test ! -L $(PREFIX)/bin/enroot || rm -f $(PREFIX)/bin/enroot $(PREFIX)/share/bash-completion/completions/enroot
	test ! -L $(PREFIX)/share/man/man1/enroot.1 || rm $(PREFIX)/share/man/man1/enroot.1
	rm -f $(PREFIX)/share/man/man1/penroot*.1 $(PREFIX)/share/man/man5/penroot*.5
	rm -f $(PREFIX)/share/man/man1/pyxis-py.1 $(PREFIX)/share/man/man7/penroot-srun.7
	rm -f $(PREFIX)/share/bash-completion/completions/penroot
	test -n "$$(find $(PREFIX) ! -type d -print -quit)" || rm -rf $(PREFIX)

packages: $(VENV)/done ## deb, rpm and archive, in dist/packages
	@tests/prerequisites packaging
	@$(VENV)/bin/python -m packages

packages-test: $(VENV)/done ## packages installed in fresh Debians, and built twice: half an hour
	@tests/prerequisites packages
	$(PYTEST) tests/packages -o timeout=1800 --capture=tee-sys

# The Debians take as long as the packages: they are made meanwhile.
packages-ci: $(VENV)/done ## of packages-test: deb and rpm, made once, judged, installed in fresh Debians and used for a job; and the Ansible role
	@tests/prerequisites packaging
	@$(VENV)/bin/python -m tests.packages & debians=$$!; $(VENV)/bin/python -m packages deb rpm; made=$$?; wait $$debians && exit $$made
	PENROOT_PACKAGES_MADE=dist/packages $(PYTEST) tests/packages -k 'test_rpm or two_commands or lintian or shared_file_system' -o timeout=1800 --durations=10

release: $(VENV)/done ## all that a release has, in dist/release: a commit, with its part in CHANGELOG.md
	@tests/prerequisites packaging
	@$(VENV)/bin/python -m packages --release --output dist/release

clean:
	rm -rf build dist site c_shims/helpers/build c_shims/runtime/build $(VENV) *.egg-info .mypy_cache .ruff_cache .pytest_cache enroot_py/base/_linux*.so enroot_py/base/_linux.c $(PLUGIN) libexec bin/penroot-*
