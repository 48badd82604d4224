# SPDX-License-Identifier: Apache-2.0

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# Slow things that outlive a clone: kernels, the linter. Safe to delete.
ifeq ($(shell id -u),0)
REDIRECTOR_CACHE ?= /var/cache/redirector
else
REDIRECTOR_CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/redirector
endif
export REDIRECTOR_CACHE

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null)
COMMIT ?= $(shell git rev-parse HEAD 2>/dev/null)
# Both come from git by -ldflags; the go command's own stamp would fail where git distrusts the folder's owner.
GOBUILD = CGO_ENABLED=0 go build -buildvcs=false -trimpath -ldflags='-s -w -X main.version=$(VERSION) -X main.commit=$(COMMIT)'

CLANG_FORMAT := clang-format-19
C_FILES = $(wildcard bpf/*.c bpf/*.h)

GOLANGCI_VERSION := v2.15.0
# A linter that was built with an older Go refuses newer code.
GOLANGCI = $(REDIRECTOR_CACHE)/golangci-lint-$(GOLANGCI_VERSION)-$(shell go env GOVERSION)/golangci-lint

# What wants other versions of libraries than Redirector has a module of its own. make test tests them after all else.
MODULES := deploy/image test/chart test/e2e/app test/bench
define newline


endef

# For go test, e.g. make test TESTFLAGS='-run TestEnrol -v' PKG=./pkg/enroll
PKG ?= ./...
TESTFLAGS ?=

# make vmtest: every line, or KERNEL=6.1; every test, or RUN=TestName; every package, or PKG=./pkg/loader.
KERNELS := 5.10 6.1 6.12 newest
KERNEL ?= $(KERNELS)
RUN ?=
# Packages whose tests ask nothing of a kernel, or more than one has: the go command, QEMU, Debian's CNI plugins, resolvers or proxies, an
# API server, or many minutes.
VM_EXCLUDE := deploy docs pkg/journal test/vm/machine test/vm/matrix test/vm/verifier test/vm/guest test/vm/cmd/vmexec test/vm/cmd/vmmatrix test/mutate test/cni test/resolvers test/proxies test/kube \
	test/podwatch test/soak test/scale
VMFLAGS ?=
# Besides the committed object, which clang 19 has made, the programs of this compiler have to pass the verifier.
OTHER_CLANG := clang-16

.PHONY: help
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: build
build: ## Build bin/redirector and the kubectl plugin, static, with the version from git
	@mkdir -p bin
	$(GOBUILD) -o bin/redirector ./cmd/redirector
	$(GOBUILD) -o bin/kubectl-redirector ./cmd/kubectl-redirector

# DEMOFLAGS=-hold waits in the middle, to look around.
.PHONY: demo
demo: root ## Two pods, a node proxy and real traffic in namespaces on this machine (root)
	@mkdir -p bin
	$(GOBUILD) -o bin/demo ./test/demo
	bin/demo $(DEMOFLAGS)

.PHONY: screenshots
screenshots: root build ## Draw what the commands show, from real runs: docs/images (root)
	@hack/install-deps.sh screenshots
	$(GOBUILD) -o bin/demo ./test/demo
	hack/screenshots.py docs/images

.PHONY: test
test: root ## Run all tests on this machine's kernel (root)
	@hack/install-deps.sh test
	go test -count=1 -timeout=20m $(TESTFLAGS) $(PKG)
ifeq ($(PKG),./...)
	$(foreach m,$(MODULES),cd $(CURDIR)/$(m) && go test -count=1 ./...$(newline)	)
endif

# From a seed that is printed, or SEED=42.
SOAK ?= 30s
SEED ?=
.PHONY: soak
soak: root ## All that can happen to a node at once, under traffic, for SOAK=30s (root)
	SOAK='$(SOAK)' SEED='$(SEED)' go test -count=1 -timeout=0 -run='^TestSoak$$' -v ./test/soak

# Where something that it needs is missing, and cannot be installed, it fails and says what.
.PHONY: e2e
e2e: root ## The chart, and what it installs in real clusters of one and two nodes, in namespaces on this machine (root, containerd)
	@hack/install-deps.sh e2e
	go test -tags=e2e -count=1 -timeout=20m $(TESTFLAGS) ./test/e2e
	cd test/chart && go test -count=1 ./...

.PHONY: race
race: root ## The same with the race detector
	@hack/install-deps.sh race
	CGO_ENABLED=1 go test -race -count=1 -timeout=40m $(TESTFLAGS) $(PKG)

# Some ten minutes on a machine that does nothing else; BENCHFLAGS=-help shows the flags. With PKG=./test/scale, that package's Go
# benchmarks.
BENCHFLAGS ?=
.PHONY: bench
bench: root ## Compare with no redirection, iptables and nftables: docs/performance (root); or PKG=./test/scale
ifeq ($(PKG),./...)
	$(BENCHBUILD)
	bin/bench -commit '$(VERSION)' -out docs/performance $(BENCHFLAGS)
else
	go test -run='^$$' -bench=. -benchmem -timeout=30m $(TESTFLAGS) $(PKG)
endif

.PHONY: bench-quick
bench-quick: root ## The same in a minute, to see a disaster (root)
	$(BENCHBUILD)
	bin/bench -commit '$(VERSION)' -quick -check $(BENCHFLAGS)

define BENCHBUILD
@hack/install-deps.sh bench
@mkdir -p bin
cd test/bench && CGO_ENABLED=0 go build -buildvcs=false -o ../../bin/bench .
endef

.PHONY: mutate
mutate: root ## Take rules out one by one, and see a test fail for each (root, clang)
	@hack/install-deps.sh generate
	go run ./test/mutate $(MUTATEFLAGS)

.PHONY: man
man: ## Write manual pages and shell completion into build/
	go run ./hack/man build/man
	mkdir -p build/completion
	for shell in bash zsh fish; do go run ./cmd/redirector completion $$shell > build/completion/redirector.$$shell || exit 1; done

.PHONY: vmtest
vmtest: vm-kernels vm-objects ## Run the tests on other kernels in QEMU: KERNEL=6.1 RUN=TestName PKG=./pkg/loader
	go run ./test/vm/cmd/vmmatrix -kernels '$(KERNEL)' -packages '$(PKG)' -run '$(RUN)' -exclude '$(VM_EXCLUDE)' \
		-objects build/objects $(VMFLAGS)

.PHONY: vm-objects
vm-objects: ## Compile the BPF programs with another compiler than the committed object's
	@hack/install-deps.sh objects
	@rm -rf build/objects
	@go run ./test/rebuild/cmd/object build/objects $(OTHER_CLANG)

.PHONY: verifier-table
verifier-table: ## Load all programs on all kernels, and note what the verifier had to do: docs/verifier.md
	$(MAKE) vmtest PKG=./pkg/loader RUN='^TestVerifier' VMFLAGS='-machines ordinary $(VMFLAGS)' || true
	go run ./test/vm/cmd/verifiertable
	go test ./docs -update

.PHONY: vm-kernels
vm-kernels: ## Put the kernels of vmtest and QEMU on this machine
	@hack/install-deps.sh vm
	@test/vm/fetch.sh $(KERNEL)

# IMAGE=NAME:TAG is the image's name; it needs no registry.
IMAGE ?= redirector:$(or $(VERSION),dev)
.PHONY: image
image: ## Build the image for amd64 and arm64 in build/image: OCI layout, docker-load archives, bills of materials
	@mkdir -p build/image
	for arch in amd64 arm64; do GOARCH=$$arch $(GOBUILD) -o build/image/redirector-$$arch ./cmd/redirector; done
	cd deploy/image && go run . -tag '$(IMAGE)' -version '$(or $(VERSION),dev)' -commit '$(COMMIT)' -o ../../build/image \
		amd64=../../build/image/redirector-amd64 arm64=../../build/image/redirector-arm64

.PHONY: manifests
manifests: ## Render the chart into deploy/redirector.yaml and the tests' files; tests fail when that was forgotten
	cd test/chart && go test -count=1 . -update

.PHONY: kube
kube: ## Build the etcd and Kubernetes of the tests, once; tests that need them do the same
	@go run ./test/kube/cmd/kubebinary

.PHONY: generate
generate: ## Compile the BPF programs and the protocol buffers (clang 19, protoc)
	@hack/install-deps.sh generate
	go generate ./...

.PHONY: generate-check
generate-check: ## Fail when the committed generated files are not what their sources make
	@hack/generate-check.sh

.PHONY: fmt
fmt: ## Format Go and C
	gofmt -w .
	@hack/install-deps.sh format
	$(if $(C_FILES),$(CLANG_FORMAT) -i $(C_FILES))

.PHONY: fmt-check
fmt-check: ## Fail when Go or C is not formatted
	@unformatted=$$(gofmt -l .); \
	if [ -n "$$unformatted" ]; then printf 'not formatted, run make fmt:\n%s\n' "$$unformatted" >&2; exit 1; fi
	@hack/install-deps.sh format
	$(if $(C_FILES),$(CLANG_FORMAT) --dry-run --Werror $(C_FILES))

.PHONY: vet
vet: ## Run go vet
	go vet ./...
	$(foreach m,$(MODULES),cd $(CURDIR)/$(m) && go vet ./...$(newline)	)

.PHONY: lint
lint: $(GOLANGCI) ## Run golangci-lint and shellcheck, and look for missing licence lines
	@hack/install-deps.sh lint
	$(GOLANGCI) run ./...
	$(foreach m,$(MODULES),cd $(CURDIR)/$(m) && $(GOLANGCI) run ./...$(newline)	)
	shellcheck $$(git grep --untracked -lE '^#!.*\bbash' -- ':!*.go')
	@hack/check-spdx.sh

$(GOLANGCI):
	@echo "building golangci-lint $(GOLANGCI_VERSION), once; takes some minutes"
	GOBIN=$(@D) GOFLAGS= go install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(GOLANGCI_VERSION)

.PHONY: root
root:
	@if [ "$$(id -u)" != 0 ]; then \
		echo "make $(MAKECMDGOALS) needs root: it makes network namespaces and loads BPF programs." >&2; \
		echo "Run: sudo env \"PATH=\$$PATH\" make $(MAKECMDGOALS)" >&2; exit 1; fi

.PHONY: clean
clean: ## Remove what was built here (the cache stays)
	rm -rf bin build
