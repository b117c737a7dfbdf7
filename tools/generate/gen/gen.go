// Package gen generates files of the repository, in named steps. A step reads and writes below a root, so a check may run
// it on a copy.
package gen

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/tools/bench/result"
	"github.com/isthmus-net/isthmus/tools/compile"
	"github.com/isthmus-net/isthmus/tools/deps/debian"
	"github.com/isthmus-net/isthmus/tools/generate/conformance"
	"github.com/isthmus-net/isthmus/tools/process"
)

// A Step writes some of the generated files.
type Step struct {
	Name  string
	About string
	// Outputs are patterns of path.Match, relative to the root. They match the files of the step and no others.
	Outputs []string

	packages []string // Debian packages that it needs
	run      func(ctx context.Context, root string) error
}

// reference is the folder of the baseline programs of the dataplane benchmark.
const reference = "tools/bench/dataplane/internal/reference"

// Steps lists all steps. Each follows those whose output it reads.
var Steps = []Step{
	{
		Name:     "bpf",
		About:    "eBPF objects and their Go bindings, by bpf2go and clang 19",
		Outputs:  []string{"bpf/*_bpfe[bl].go", "bpf/*_bpfe[bl].o", reference + "/*_bpfe[bl].go", reference + "/*_bpfe[bl].o"},
		packages: []string{"clang-19", "llvm-19"},
		run: func(ctx context.Context, root string) error {
			return command(ctx, root, "go", "generate", "./bpf", "./"+reference)
		},
	},
	{
		Name:    "api",
		About:   "deepcopy functions and CRDs, by controller-gen",
		Outputs: []string{"controlplane/api/*/zz_generated.deepcopy.go", "controlplane/api/*/*/zz_generated.deepcopy.go", "controlplane/api/crds/*.yaml", "gateway/api/*/zz_generated.deepcopy.go", "gateway/api/crds/*.yaml"},
		run: func(ctx context.Context, root string) error {
			return errors.Join(
				controllerGen(ctx, root, "object", "crd", "paths=./controlplane/api/...", "output:crd:dir=controlplane/api/crds"),
				controllerGen(ctx, root, "object", "crd", "paths=./gateway/api/...", "output:crd:dir=gateway/api/crds"),
			)
		},
	},
	{
		Name:    "rbac",
		About:   "the roles of the controllers and the agent, from the markers beside the calls to the API",
		Outputs: []string{"controlplane/rbac/*.yaml", "cmd/*/rbac/*.yaml", "gateway/controller/rbac/*.yaml"},
		run: func(ctx context.Context, root string) error {
			const reviews = "paths=./cmd/internal/httpserver/reviews" // of all programs that serve HTTP in a cluster
			return errors.Join(
				controllerGen(ctx, root, "rbac:roleName=isthmus-controller", "paths=./controlplane/...", reviews, "output:rbac:dir=controlplane/rbac"),
				controllerGen(ctx, root, "rbac:roleName=isthmus-machines", "paths=./cmd/isthmus-controller/...", "output:rbac:dir=cmd/isthmus-controller/rbac"),
				controllerGen(ctx, root, "rbac:roleName=isthmus-gateway-controller", "paths=./gateway/controller/...", reviews, "output:rbac:dir=gateway/controller/rbac"),
				controllerGen(ctx, root, "rbac:roleName=isthmus-agent", "paths=./cmd/isthmus-agent/...", reviews, "output:rbac:dir=cmd/isthmus-agent/rbac"),
			)
		},
	},
	{
		Name:    "chart",
		About:   "the chart's copies of the CRDs, of the roles and of the admission policies, and what fences a member of a federation",
		Outputs: []string{"deploy/helm/isthmus/crds/*.yaml", "deploy/helm/isthmus/files/*.yaml", "deploy/helm/isthmus/files/policies/*.yaml"},
		run:     chart,
	},
	{
		Name:    "values",
		About:   "the chart's README, from its values and their schema",
		Outputs: []string{"deploy/helm/isthmus/README.md"},
		run:     chartPage,
	},
	{
		Name:    "manifests",
		About:   "plain manifests: the chart with its defaults, and what forms a federation",
		Outputs: []string{"deploy/manifests/*.yaml"},
		run:     manifests,
	},
	{
		Name:    "performance",
		About:   "docs/performance.md, from stored results of benchmarks",
		Outputs: []string{"docs/performance.md"},
		run: func(_ context.Context, root string) error {
			page, err := result.Page(filepath.Join(root, "docs/performance"))
			if err != nil {
				return err
			}
			return write(filepath.Join(root, "docs/performance.md"), page)
		},
	},
	{
		Name:    "conformance",
		About:   "docs/conformance.md, from docs/conformance/*.yaml and the tests that call conformance.Holds",
		Outputs: []string{"docs/conformance.md"},
		run: func(_ context.Context, root string) error {
			page, err := conformance.Page(root)
			if err != nil {
				return err
			}
			return write(filepath.Join(root, "docs/conformance.md"), page)
		},
	},
}

// Run runs the named steps, or all, on the repository at root, and installs the packages they need. It stops at the first
// that fails.
func Run(ctx context.Context, root string, progress io.Writer, names ...string) error {
	for _, name := range names {
		if !slices.ContainsFunc(Steps, func(s Step) bool { return s.Name == name }) {
			return fmt.Errorf("there is no step %q; -list shows all", name)
		}
	}
	for _, s := range Steps {
		if len(names) > 0 && !slices.Contains(names, s.Name) {
			continue
		}
		if err := debian.Ensure(ctx, progress, s.packages...); err != nil {
			return fmt.Errorf("%s: %w", s.Name, err)
		}
		begin := time.Now()
		if err := s.run(ctx, root); err != nil {
			return fmt.Errorf("%s: %w", s.Name, err)
		}
		fmt.Fprintf(progress, "generate %-11s %5.1fs\n", s.Name, time.Since(begin).Seconds())
	}
	return nil
}

// Files returns the contents of the step's files below root, by path relative to root.
func (s Step) Files(root string) (map[string][]byte, error) {
	files := map[string][]byte{}
	for _, pattern := range s.Outputs {
		paths, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			return nil, fmt.Errorf("pattern %s: %w", pattern, err)
		}
		for _, path := range paths {
			name, err := filepath.Rel(root, path)
			if err != nil {
				return nil, err
			}
			if files[name], err = os.ReadFile(path); err != nil {
				return nil, err
			}
		}
	}
	return files, nil
}

// chart copies CRDs, roles and admission policies into the chart, where Helm expects them.
func chart(ctx context.Context, root string) error {
	mcs, err := output(ctx, root, "go", "list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/mcs-api")
	if err != nil {
		return err
	}
	const crds, policies = "deploy/helm/isthmus/crds", "deploy/helm/isthmus/files/policies"
	copies := map[string]string{ // from -> to
		filepath.Join(root, "controlplane/rbac/role.yaml"):           "deploy/helm/isthmus/files/controller-role.yaml",
		filepath.Join(root, "cmd/isthmus-controller/rbac/role.yaml"): "deploy/helm/isthmus/files/machines-role.yaml",
		filepath.Join(root, "cmd/isthmus-agent/rbac/role.yaml"):      "deploy/helm/isthmus/files/agent-role.yaml",
		filepath.Join(root, "gateway/controller/rbac/role.yaml"):     "deploy/helm/isthmus/files/gateway-controller-role.yaml",
	}
	fences, err := filepath.Glob(filepath.Join(root, "controlplane/api/fences/policies/*.yaml"))
	if err != nil || len(fences) == 0 {
		return fmt.Errorf("there is no policy of controlplane/api/fences (%w)", errors.Join(err, os.ErrNotExist))
	}
	for _, path := range fences {
		copies[path] = filepath.Join(policies, filepath.Base(path))
	}
	for _, pattern := range []string{
		filepath.Join(root, "controlplane/api/crds/*.yaml"),
		filepath.Join(root, "gateway/api/crds/*.yaml"),
		filepath.Join(strings.TrimSpace(mcs), "config/crd/*.yaml"),
	} {
		paths, err := filepath.Glob(pattern)
		if err != nil || len(paths) == 0 {
			return fmt.Errorf("no CRD matches %s (%w)", pattern, errors.Join(err, os.ErrNotExist))
		}
		for _, path := range paths {
			copies[path] = filepath.Join(crds, filepath.Base(path))
		}
	}
	contents := make(map[string][]byte, len(copies))
	for from, to := range copies {
		if contents[to], err = os.ReadFile(from); err != nil {
			return err
		}
	}
	// A CRD or a policy that is no longer there must not live on in the chart.
	if err := errors.Join(os.RemoveAll(filepath.Join(root, crds)), os.RemoveAll(filepath.Join(root, policies))); err != nil {
		return err
	}
	for to, content := range contents {
		if err := write(filepath.Join(root, to), content); err != nil {
			return err
		}
	}
	return federationChart(root)
}

// manifests renders the chart with its defaults.
func manifests(ctx context.Context, root string) error {
	const note = "# Generated by `make generate` from deploy/helm/isthmus; do not edit.\n"
	helm, err := compile.Helm(ctx, root)
	if err != nil {
		return err
	}
	rendered, err := output(ctx, root, helm, "template", "isthmus", "deploy/helm/isthmus", "--namespace", "isthmus-system", "--skip-tests")
	if err != nil {
		return err
	}
	paths, err := filepath.Glob(filepath.Join(root, "deploy/helm/isthmus/crds/*.yaml"))
	if err != nil {
		return err
	}
	crds := bytes.NewBufferString(note)
	for _, path := range paths {
		content, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if !bytes.HasPrefix(content, []byte("---\n")) {
			crds.WriteString("---\n")
		}
		crds.Write(content)
	}
	if err := write(filepath.Join(root, "deploy/manifests/crds.yaml"), crds.Bytes()); err != nil {
		return err
	}
	if err := write(filepath.Join(root, "deploy/manifests/isthmus.yaml"), append([]byte(note), rendered...)); err != nil {
		return err
	}
	return federationManifests(root)
}

// write writes a file, and makes its folder.
func write(path string, content []byte) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, content, 0o644)
}

// controllerGen runs the pinned controller-gen.
func controllerGen(ctx context.Context, root string, args ...string) error {
	return command(ctx, root, "go", append([]string{"tool", "-modfile=tools/lint/go.mod", "controller-gen"}, args...)...)
}

// command runs a program in root. Its error carries the output.
func command(ctx context.Context, root, name string, args ...string) error {
	_, err := output(ctx, root, name, args...)
	return err
}

// output runs a program in root and returns its standard output.
func output(ctx context.Context, root, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = root
	return process.Output(cmd)
}
