package simulation

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/tools/compile"
	"github.com/isthmus-net/isthmus/tools/lab/cluster"
)

// assetsVariable names the folder of kube-apiserver and etcd, as for tests.
const assetsVariable = "KUBEBUILDER_ASSETS"

// Assets returns a folder with kube-apiserver and etcd: the one that the environment names, or else that of
// the labs, where what is missing is built.
func Assets(ctx context.Context, progress io.Writer) (string, error) {
	if dir := os.Getenv(assetsVariable); dir != "" {
		return dir, nil
	}
	dir, err := cluster.Assets(ctx, cluster.Config{Progress: progress})
	if err != nil {
		return "", fmt.Errorf("build kube-apiserver and etcd: %w", err)
	}
	return dir, nil
}

// BuildController builds isthmus-controller of this checkout into dir, the way that users get it, and
// returns its path.
func BuildController(ctx context.Context, dir string) (string, error) {
	path := filepath.Join(dir, "isthmus-controller")
	if output, err := compile.Go(ctx, "build", "-o", path, "github.com/isthmus-net/isthmus/cmd/isthmus-controller").CombinedOutput(); err != nil {
		return "", fmt.Errorf("build isthmus-controller: %w\n%s", err, output)
	}
	return path, nil
}

// memory is where Linux has a filesystem in memory.
const memory = "/dev/shm"

// DefaultStorage is where etcd's files go unless somebody says otherwise: into memory where the machine has
// a place for it, so that its disk is not what is measured.
func DefaultStorage() string {
	const enough = 4 << 30
	var fs unix.Statfs_t
	if err := unix.Statfs(memory, &fs); err == nil && fs.Type == unix.TMPFS_MAGIC && fs.Bavail*uint64(fs.Bsize) >= enough && unix.Access(memory, unix.W_OK) == nil {
		return memory
	}
	return os.TempDir()
}

// DescribeStorage says what it means for the figures that etcd's files are in dir.
func DescribeStorage(dir string) string {
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err == nil && fs.Type == unix.TMPFS_MAGIC {
		return fmt.Sprintf("etcd in memory (%s): its fsync costs nothing", dir)
	}
	return fmt.Sprintf("etcd on the disk of %s, with fsync", dir)
}
