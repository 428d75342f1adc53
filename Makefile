# `make help` lists the commands of this project. The most important ones are: make demo, make test.

PYTHON ?= /usr/bin/python3
PREFIX ?= /opt/penroot
LIBDIR := $(PREFIX)/lib/penroot
ifeq ($(PREFIX),)
$(error PREFIX is empty: leave it out, or set it to a directory)
endif
# LIBDIR is a link to a version in VERSIONS: enroot_py/base/versions.py.
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

demo: prerequisites ## run an MPI job in a container on a 2-node Slurm cluster with a registry on this machine; KEEP=1 leaves it up
	@$(MAKE) --no-print-directory install $(VENV)/done
	@PENROOT_PREFIX=$(PREFIX) $(VENV)/bin/python examples/demo.py

dev: $(VENV)/run $(if $(wildcard /usr/include/slurm/spank.h),$(PLUGIN)) ## prepare bin/penroot and bin/pyxis-py to run this source tree
	@$(MAKE) --no-print-directory --silent libexec NEW=$(CURDIR) LIBDIR=$(CURDIR)
	@for name in $(TOOLS); do ln -sf ../libexec/penroot-$$name bin/penroot-$$name || exit 1; done

# The plugin starts programs of the tree as the users of jobs. So its build fails if only the owner can enter the tree.
# Then `make dev` continues without a plugin.
$(PLUGIN): $(VENV)/run $(wildcard c_shims/*.h c_shims/spank/*.[ch]) pyxis_py/request/options.py pyxis_py/admin/header.py enroot_py/base/filter.py
	@bin/pyxis-py build --python $(PYTHON) --output $(CURDIR)/$@ || true

check: $(VENV)/done ## run lint and unit: a minute
	@$(MAKE) --no-print-directory --jobs=2 --output-sync lint unit

test: prerequisites $(VENV)/done ## run all checks and all tiers of tests with an installation in PREFIX
	@$(MAKE) --no-print-directory --jobs=2 --output-sync lint install EXTRAS=ssh,signatures,swarm
	PENROOT_PREFIX=$(PREFIX) tests/all

unit: $(VENV)/done ## run the tests that need no compiler, no Slurm and no root
	TMPDIR=$(firstword $(wildcard /dev/shm /tmp)) $(VENV)/bin/python -m pytest tests/unit --numprocesses 3 --dist worksteal

kernel slurm attack: dev $(VENV)/done ## run one tier of tests with this source tree, or the installation in PENROOT_PREFIX
	$(VENV)/bin/python -m pytest tests/$@

lint: $(VENV)/done ## run ruff, mypy, clang-format, hadolint, shellcheck
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/clang-format --dry-run -Werror $$(git ls-files '*.[ch]')
	$(VENV)/bin/hadolint $$(git ls-files '*Dockerfile*')
	shellcheck $$(git ls-files '*.sh'; git ls-files | xargs awk 'FNR == 1 && /^#!.*[\/ ](ba)?sh( |$$)/ { print FILENAME } { nextfile }')

# A dead link is an error, and so is a page that no list of pages contains.
docs: $(VENV)/docs ## build the generated pages of docs/, and the site in site/index.html
	$(VENV)/bin/python -m tests.docs
	rm -rf site
	$(VENV)/bin/sphinx-build --quiet --fail-on-warning --keep-going --conf-dir docs --doctree-dir build/doctrees . site

docs-test: docs ## check the site in a browser without network
	@tests/prerequisites chromium fonts-dejavu-core
	$(PYTEST) tests/docs

repeat: $(VENV)/done ## run TESTS=tests (all) TIMES=3 times to find unreliable tests
	PENROOT_PREFIX=$(PREFIX) $(VENV)/bin/python -m tests.repeat --times $(or $(TIMES),3) $(TESTS)

MATRIX = $(PYTHON) -m tests.matrix $(ARCH:%=--arch %) $(RELEASES:%=--release %)
matrix: prerequisites ## run the tests on Debian's RELEASES="bookworm trixie forky", with SLURM_SOURCE=DIR, or emulated: ARCH=arm64
	@tests/prerequisites $(if $(ARCH),cross)
	@$(MATRIX) $(TIERS:%=--tier %) $(TESTS:%=--test %) $(SLURM_SOURCE:%=--slurm-source %)

matrix-ci: prerequisites ## run the Slurm tests on trixie and forky: ten minutes each
	@$(MATRIX) --quick

matrix-vm: prerequisites ## run the Slurm and systemd tests in a virtual machine with RELEASES=trixie: hours without KVM; ARCH=arm64
	@tests/prerequisites e2fsprogs $(if $(ARCH),cross qemu-system-arm,qemu-system-x86)
	@$(PYTHON) -m tests.matrix --vm $(ARCH:%=--arch %) $(patsubst %,--release %,$(or $(RELEASES),trixie)) $(TIERS:%=--tier %) $(TESTS:%=--test %)

differential: $(VENV)/done ## run each line of tests/parity/lines with penroot and with ENROOT=/usr/bin/enroot
	PENROOT_PREFIX=$(PREFIX) $(VENV)/bin/python -m tests.parity.differential $(ENROOT:%=--enroot %)

bench: $(VENV)/done ## measure ratios to other tools in one run
	PENROOT_PREFIX=$(PREFIX) $(VENV)/bin/python -m benchmarks

soak: $(VENV)/done ## run long loops and fuzzing
	$(PYTEST) tests -m soak --soak

test-gpu: $(VENV)/done ## run the tests that need a GPU
	$(PYTEST) tests/gpu

prerequisites:
	@tests/prerequisites

# The environment that runs the source tree, with the C module. Build tools are installed here once, not for each build.
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

# A #! line takes one argument: -IS. With it, Python ignores the caller's environment, and site-packages, which take
# most of the start-up time.
launcher = sed -e 's,@PYTHON@,$(PYTHON),' -e 's,@LIBRARY@,$(LIBDIR),' -e 's,@MODULE@,$(1),' configs/launcher > $(2).new && \
	chmod 755 $(2).new && mv -f $(2).new $(2)
# A package build installs to ROOT. The programs below run modules in MODULES, because NEW may be for another machine.
ROOT := $(DESTDIR)$(PREFIX)
NEW  ?= $(ROOT)/lib/penroot
MODULES ?= $(NEW)
from = $(PYTHON) -IS -c 'import sys; sys.path.insert(0, "$(MODULES)"); sys.argv[0] = "$(1)"; $(2)'
run  = $(call from,$(2),from $(1) import main; main())

install: ## install into PREFIX for all users, with the plugin if slurm/spank.h exists; EXTRAS=ssh,signatures,swarm
	rm -rf build
	mkdir -p $(PREFIX)/bin $(VERSIONS)
	@new=$$(mktemp -d $(VERSIONS)/$(VERSION)-XXXXXX) && chmod 755 $$new && { $(MAKE) --no-print-directory NEW=$$new version || { rm -rf $$new; exit 1; }; }

version: # install to NEW, then make LIBDIR a link to it
	PENROOT_BUILD="make install" $(PYTHON) -m pip install --quiet --no-compile --no-warn-script-location --target $(NEW) '.$(EXTRAS:%=[%])'
	$(PYTHON) -m packages.library $(NEW)
	@$(MAKE) --no-print-directory libexec
	$(call from,packing,from enroot_py.base import packing; packing.write())
	# Slurm refuses every job while a required plugin is missing, so keep the old plugin until there is a new one.
	@if test -e /usr/include/slurm/spank.h; then $(MAKE) --no-print-directory plugin; \
	elif test -e $(LIBDIR)/$(PLUGIN); then cp -pL $(LIBDIR)/$(PLUGIN) $(NEW) && \
		echo 'keeping the old $(PLUGIN); to build a new one: pyxis-py install --slurm-include DIR'; fi
	chmod -R a+rX $(NEW)
	@$(MAKE) --no-print-directory around
	chmod -R a+rX $(PREFIX)/bin $(PREFIX)/libexec $(PREFIX)/share
	$(call from,versions,from enroot_py.base import versions; versions.use())

libexec: # install helper programs and the programs of hooks to NEW
	$(MAKE) --no-print-directory --silent -C c_shims/programs install LIBEXEC=$(NEW)/libexec
	@for name in $(TOOLS); do tool=$(NEW)/libexec/penroot-$$name && \
		case " $(LAYERS) " in *" $$name "*) module=ovlfs ;; *) module=tools ;; esac && \
		$(call launcher,enroot_py.cli.'$$module',$$tool) && ln -sf penroot-$$name $(NEW)/libexec/enroot-$$name || exit 1; done
	ln -sf penroot-unshare $(NEW)/libexec/enroot-nsenter

around: # install programs, manual pages, completion and the AppArmor profile
	mkdir -p $(ROOT)/bin $(ROOT)/libexec/penroot $(ROOT)/share/bash-completion/completions $(ROOT)/share/penroot/apparmor
	@$(call launcher,enroot_py.main,$(ROOT)/bin/penroot)
	@$(call launcher,pyxis_py.admin.cli,$(ROOT)/bin/pyxis-py)
	@$(call run,enroot_py.main,penroot) completion bash > $(ROOT)/share/bash-completion/completions/penroot
	@$(call run,enroot_py.main,penroot) manual $(ROOT)/share/man > $(ROOT)/share/penroot/penroot.yaml
	@$(call run,pyxis_py.admin.cli,pyxis-py) manual $(ROOT)/share/man
	sed 's,@PREFIX@,$(PREFIX),' configs/apparmor/penroot > $(ROOT)/share/penroot/apparmor/penroot
	@for path in $(NEW)/libexec/*; do name=$${path##*/} && ln -sf ../../lib/penroot/libexec/$$name $(ROOT)/libexec/penroot/$$name || exit 1; done
	for name in $(TOOLS); do ln -sf ../libexec/penroot/penroot-$$name $(ROOT)/bin/penroot-$$name || exit 1; done

enroot-names: ## install links in PREFIX/bin under the names of enroot's programs
	ln -sf penroot $(ROOT)/bin/enroot
	for name in $(TOOLS); do ln -sf penroot-$$name $(ROOT)/bin/enroot-$$name || exit 1; done
	ln -sf penroot-unshare $(ROOT)/bin/enroot-nsenter
	mkdir -p $(ROOT)/share/man/man1 $(ROOT)/share/bash-completion/completions
	ln -sf penroot.1 $(ROOT)/share/man/man1/enroot.1
	@$(if $(DESTDIR),$(call run,enroot_py.main,enroot),$(PREFIX)/bin/enroot) completion bash > $(ROOT)/share/bash-completion/completions/enroot

plugin: ## build spank_pyxis.so with this machine's slurm/spank.h
	@$(PYTHON) -IS -c 'import sys; sys.path.insert(0, "$(NEW)"); sys.argv = ["pyxis-py", "build", "--output", "$(NEW)/$(PLUGIN)"]; from pyxis_py.admin.cli import main; main()'

runtime-plugin: ## build a prototype of runtime/penroot for Slurm 26.11 in the configured SLURM_SOURCE=DIR
	@$(MAKE) --no-print-directory -C c_shims/runtime SLURM_SOURCE=$(abspath $(SLURM_SOURCE)) PYTHON=$(PYTHON) LIBDIR=$(LIBDIR)

uninstall: ## remove the installation in PREFIX, and this node's line in plugstack.conf.d
	test ! -e $(PREFIX)/bin/pyxis-py || $(PREFIX)/bin/pyxis-py uninstall --prefix $(PREFIX)
	rm -rf $(LIBDIR) $(VERSIONS) $(PREFIX)/libexec/penroot $(PREFIX)/share/penroot $(PREFIX)/bin/penroot $(PREFIX)/bin/pyxis-py
	rm -f $(TOOLS:%=$(PREFIX)/bin/penroot-%) $(TOOLS:%=$(PREFIX)/bin/enroot-%) $(PREFIX)/bin/enroot-nsenter
	test ! -L $(PREFIX)/bin/enroot || rm -f $(PREFIX)/bin/enroot $(PREFIX)/share/bash-completion/completions/enroot
	test ! -L $(PREFIX)/share/man/man1/enroot.1 || rm $(PREFIX)/share/man/man1/enroot.1
	rm -f $(PREFIX)/share/man/man1/penroot*.1 $(PREFIX)/share/man/man5/penroot*.5
	rm -f $(PREFIX)/share/man/man1/pyxis-py.1 $(PREFIX)/share/man/man7/penroot-srun.7
	rm -f $(PREFIX)/share/bash-completion/completions/penroot
	test -n "$$(find $(PREFIX) ! -type d -print -quit)" || rm -rf $(PREFIX)

packages: $(VENV)/done ## build deb, rpm and archive in dist/packages; ARCH=arm64 in dist/packages-arm64
	@tests/prerequisites packaging $(if $(ARCH),cross)
	@$(VENV)/bin/python -m packages

packages-test: $(VENV)/done ## install packages in fresh Debians, and build them twice: half an hour
	@tests/prerequisites packages cross
	$(PYTEST) tests/packages -o timeout=1800 --capture=tee-sys

# Make the Debian file systems and the packages at the same time, because both take long.
packages-ci: $(VENV)/done ## build deb and rpm once, lint and install them, run a job; run the Ansible role
	@tests/prerequisites packaging
	@$(VENV)/bin/python -m tests.packages & debians=$$!; $(VENV)/bin/python -m packages deb rpm; made=$$?; wait $$debians && exit $$made
	PENROOT_PACKAGES_MADE=dist/packages $(PYTEST) tests/packages -k 'test_rpm or two_commands or lintian or shared_file_system' -o timeout=1800 --durations=10

release: $(VENV)/done ## build a release in dist/release, from a clean commit with a section in CHANGELOG.md
	@tests/prerequisites packaging cross
	@$(VENV)/bin/python -m packages --release --output dist/release

clean:
	rm -rf build dist site c_shims/programs/build c_shims/runtime/build $(VENV) *.egg-info .mypy_cache .ruff_cache .pytest_cache enroot_py/base/_linux*.so enroot_py/base/_linux.c $(PLUGIN) libexec bin/penroot-*
