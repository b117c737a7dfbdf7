package neutron

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"

	"github.com/isthmus-net/isthmus/tools/lab/cluster"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// kept lists the files of a newly filled cloud, apart from its databases.
var kept = []string{"fernet", "credential", "clouds.yaml", "ids.json", "keystone.made", "identities.made", "neutron.made", "networks.made"}

var databases = []string{"keystone.db", "neutron.db"}

// template returns the cached folder of a newly filled cloud with the same packages and configuration. Filling a cloud takes
// half a minute; copying one is immediate.
func (c *Cloud) template(ctx context.Context) (string, error) {
	versions, err := exec.CommandContext(ctx, "dpkg-query", append([]string{"--show"}, c.packages()...)...).Output()
	if err != nil {
		return "", fmt.Errorf("versions of packages: %w", err)
	}
	sum := sha256.New()
	fmt.Fprintf(sum, "4 %s %s %v %v %v %s %s", versions, c.cfg.Addr, c.cfg.External, c.cfg.Internal, c.cfg.Gateways, schema, credentials)
	if c.cfg.Compute {
		fmt.Fprint(sum, compute)
	}
	if c.cfg.Engine {
		fmt.Fprint(sum, "engine")
	}
	return filepath.Join(cluster.CacheDir(), fmt.Sprintf("cloud-%x", sum.Sum(nil)[:8])), nil
}

// Prepare caches the template that Up copies, unless it exists. It starts a cloud with the same configuration in a network of
// its own, and removes it again.
func (c *Cloud) Prepare(ctx context.Context) (err error) {
	if err := c.Install(ctx); err != nil {
		return err
	}
	like, err := c.template(ctx)
	if err != nil {
		return err
	}
	if _, err := os.Stat(like); err == nil {
		return nil
	}
	fmt.Fprintln(c.cfg.Progress, "cloud: fill a template that later clouds copy")
	cfg := c.cfg
	if cfg.Dir, err = os.MkdirTemp("", "isthmus-cloud-"); err != nil {
		return err
	}
	ns, err := netlab.NewNamespace()
	if err != nil {
		return errors.Join(err, os.Remove(cfg.Dir))
	}
	defer func() { err = errors.Join(err, ns.Close()) }()
	if !cfg.Addr.IsLoopback() {
		if err := ns.Own(cfg.Addr); err != nil {
			return errors.Join(err, os.Remove(cfg.Dir))
		}
	}
	cfg.Namespace = ns.Path()
	first := &Cloud{cfg}
	return errors.Join(first.Up(ctx), first.Down(context.WithoutCancel(ctx)))
}

// fromTemplate copies the template into an empty cloud, if the template exists.
func (c *Cloud) fromTemplate(ctx context.Context) error {
	from, err := c.template(ctx)
	if err != nil || c.exists("keystone.made") {
		return err
	}
	if _, err := os.Stat(from); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return os.CopyFS(c.cfg.Dir, os.DirFS(from))
}

// toTemplate stores a newly filled cloud as the template, before any client has used the cloud.
func (c *Cloud) toTemplate(ctx context.Context) error {
	to, err := c.template(ctx)
	if err != nil {
		return err
	}
	if _, err := os.Stat(to); err == nil {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	temporary, err := os.MkdirTemp(filepath.Dir(to), "cloud-*.tmp")
	if err != nil {
		return err
	}
	defer os.RemoveAll(temporary)
	databases, kept := databases, kept
	if c.cfg.Compute {
		databases, kept = slices.Concat(databases, novaDatabases), append(slices.Clone(kept), "nova.made")
	}
	for _, db := range databases { // all are in use
		const backup = "import sqlite3, sys; sqlite3.connect(sys.argv[1]).backup(sqlite3.connect(sys.argv[2]))"
		if err := c.run(ctx, "/usr/bin/python3", "-c", backup, c.path(db), filepath.Join(temporary, db)); err != nil {
			return err
		}
		if err := c.writeAhead(ctx, filepath.Join(temporary, db)); err != nil {
			return err
		}
	}
	if c.cfg.Engine {
		if err := c.backupEngine(ctx, filepath.Join(temporary, northbound)); err != nil {
			return err
		}
	}
	for _, name := range kept {
		if err := copyTo(filepath.Join(temporary, name), c.path(name)); err != nil {
			return err
		}
	}
	if err := os.Rename(temporary, to); err != nil && !errors.Is(err, fs.ErrExist) { // another process has stored it
		return err
	}
	return nil
}

// copyTo copies a file, or a folder with files.
func copyTo(to, from string) error {
	info, err := os.Stat(from)
	if err != nil {
		return err
	}
	if info.IsDir() {
		return os.CopyFS(to, os.DirFS(from))
	}
	b, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return os.WriteFile(to, b, info.Mode().Perm())
}
