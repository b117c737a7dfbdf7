package cluster

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/isthmus-net/isthmus/tools/lab/internal/cache"
)

// Assets returns a folder that holds kube-apiserver, etcd and kubectl, as controller-runtime's envtest wants
// it in KUBEBUILDER_ASSETS, and kube-controller-manager and kube-proxy for who needs those. They are the programs
// of the labs of cfg.Dir; what is missing is built. No lab has to be up.
func Assets(ctx context.Context, cfg Config) (string, error) {
	l, err := Open(cfg)
	if err != nil {
		return "", err
	}
	unlock, err := l.cache.Lock()
	if err != nil {
		return "", err
	}
	defer unlock()
	programs, err := l.cache.Programs(ctx)
	if err != nil {
		return "", err
	}
	// A folder for each pair of versions: tests that run meanwhile keep theirs.
	dir := filepath.Join(l.cache.Dir, "assets", filepath.Base(filepath.Dir(programs["kube-apiserver"])), filepath.Base(filepath.Dir(programs["etcd"])))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	for _, name := range []string{"kube-apiserver", "etcd", "kubectl", "kube-controller-manager", "kube-proxy"} {
		if err := os.Symlink(programs[name], filepath.Join(dir, name)); err != nil && !errors.Is(err, fs.ErrExist) {
			return "", fmt.Errorf("collect the API server's programs: %w", err)
		}
	}
	return dir, nil
}

// BuildPrograms builds the programs of all labs, unless they are there. No lab has to be up. Up does so too, but a caller that compiles
// something while a lab comes up calls it before: two builds at once compile the packages that they share twice.
func (l *Lab) BuildPrograms(ctx context.Context) error {
	unlock, err := l.cache.Lock()
	if err != nil {
		return err
	}
	defer unlock()
	_, err = l.cache.Programs(ctx)
	return err
}

// The names of optional programs.
const (
	ExternalDNS = cache.ExternalDNS
	KubeRouter  = cache.KubeRouter
)

// OptionalPrograms returns the names of all of them.
func OptionalPrograms() []string { return cache.OptionalPrograms() }

// Build builds an optional program, unless it is there, and returns its path. No lab has to be up.
func (l *Lab) Build(ctx context.Context, program string) (string, error) {
	unlock, err := l.cache.Lock()
	if err != nil {
		return "", err
	}
	defer unlock()
	return l.cache.Optional(ctx, program)
}

// Built returns the path of an optional program, and whether it was built.
func (l *Lab) Built(program string) (string, bool) { return l.cache.Built(program) }
