# Isthmus. Every target works alone on a fresh Debian 12 machine with Go, and installs what it needs.
# There is no logic here: a Go program or a test holds it.

# One way to compile, for programs, images, tests and linters alike (tools/compile): the build cache then holds everything
# once. It also gives static binaries with the same bytes in every checkout.
export CGO_ENABLED = 0
export GOFLAGS = -trimpath -buildvcs=false -gcflags=all=-dwarf=false

# Compiling and testing go with transparent huge pages, which are worth half of the time on some machines. Benchmarks go without.
go = go run ./tools/hugepages go

.DEFAULT_GOAL := help
.PHONY: help generate build images release check unit test test-kernels test-kernels-arm64 test-images-arm64 test-gateways test-external-dns test-policies test-security-groups test-release test-install race soak demo demo-down demo-gateway demo-gateway-down conformance-report migration

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9%-]+:.*## / {sub("%", "NAME", $$1); printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

generate: ## write eBPF objects, deepcopy functions, CRDs, RBAC and manifests anew
	$(go) run ./tools/generate

build: ## build all binaries into bin/
	$(go) build -o bin/ ./cmd/...

images: ## build the container images into bin/images/, as OCI archives
	$(go) run ./tools/images -o bin/images

release: ## all that users install, in the new folder OUT; VERSION is such as v0.1.0, KEY the file of a private key for signatures
	$(go) run ./tools/release --version "$(VERSION)" --output "$(OUT)" --key "$(KEY)"

check: ## format, lint, vet, and proof that generated files are current
	$(go) run ./tools/check

unit: ## the tests that need neither privileges nor an API server
	$(go) run ./tools/test -unit

test: ## every test; the last line counts what ran
	$(go) run ./tools/test

test-kernels: ## the dataplane on Linux 6.1 and 6.12, emulated, and on this machine's
	$(go) run ./tools/kernels

test-kernels-arm64: ## the dataplane on Linux 6.1 and 6.12 for arm64, emulated
	$(go) run ./tools/kernels 6.1-arm64 6.12-arm64

test-images-arm64: ## every image's programs start on arm64, emulated
	$(go) run ./tools/images/start --architecture arm64

test-gateways: ## gateways come and go under 10,000 connections: each balancer, return path, announcer and family
	ISTHMUS_FULL_LENGTH=1 $(go) run ./tools/test ./e2e/gateways

test-external-dns: ## the real ExternalDNS and BIND lead a machine outside of the clusters to federated Services
	$(go) run ./tools/lab build external-dns
	$(go) run ./tools/test -run 'TestFederation$$' ./e2e

test-policies: ## kube-router judges packets between clusters by federated policies
	$(go) run ./tools/lab build kube-router
	$(go) run ./tools/test -run 'TestFederation$$' ./e2e

test-security-groups: ## OVN judges packets by the security groups that policies of machines become
	ISTHMUS_SECURITY_GROUPS=1 $(go) run ./tools/test -run 'TestSecurityGroupsHold$$' ./tools/neutron

test-release: ## a release of the commit, built twice for all platforms, has the same bytes
	$(go) run ./tools/release/twice

test-install: ## the commands of README's installation on a new lab, from a release; ends with "install: ok"
	$(go) run ./e2e/install
	$(go) run ./e2e/install down

race: ## the tests that need neither privileges nor an API server, with the race detector
	$(go) run ./tools/test -race

soak: ## the repeated runs: five rounds of every test, with the race detector
	$(go) run ./tools/test -soak 5

demo: ## the main job on two real clusters; ends with "demo: ok"
	$(go) run ./e2e/demo

demo-down: ## remove what demo made
	$(go) run ./e2e/demo down

demo-gateway: ## the gateways' job, on a real cluster and a real Neutron; ends with "demo-gateway: ok"
	$(go) run ./e2e/demo/gateway

demo-gateway-down: ## remove what demo-gateway made
	$(go) run ./e2e/demo/gateway down

conformance-report: ## the MCS API's own suite against two real clusters; SUITE is a clone of its repository, FAMILIES such as ipv6-first
	$(go) run ./e2e/conformance --suite $(or $(SUITE),../mcs-api) --families=$(FAMILIES)

migration: ## move a ClusterSet of Submariner with the real Lighthouse to Isthmus and back; LIGHTHOUSE is a clone of its repository
	$(go) run ./e2e/migration --lighthouse $(or $(LIGHTHOUSE),../lighthouse)

bench-%: ## one benchmark, such as bench-dataplane
	go run ./tools/bench $*
