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

// assetsVariable names the folder of kube-apiserver and etcd, as in tests.
const assetsVariable = "KUBEBUILDER_ASSETS"

// Assets returns a folder with kube-apiserver and etcd: the folder that the environment names, or else the labs' folder, where
// missing programs are built.
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

// BuildController builds isthmus-controller of this checkout into dir, with the flags of a release, and returns its path.
func BuildController(ctx context.Context, dir string) (string, error) {
	path := filepath.Join(dir, "isthmus-controller")
	if output, err := compile.Go(ctx, "build", "-o", path, "github.com/isthmus-net/isthmus/cmd/isthmus-controller").CombinedOutput(); err != nil {
		return "", fmt.Errorf("build isthmus-controller: %w\n%s", err, output)
	}
	return path, nil
}

// memory is the mount point of Linux' filesystem in memory.
const memory = "/dev/shm"

// DefaultStorage returns the default folder for etcd's files. It is in memory if the machine has enough, so that the speed of
// the disk does not matter.
func DefaultStorage() string {
	const enough = 4 << 30
	var fs unix.Statfs_t
	if err := unix.Statfs(memory, &fs); err == nil && fs.Type == unix.TMPFS_MAGIC && fs.Bavail*uint64(fs.Bsize) >= enough && unix.Access(memory, unix.W_OK) == nil {
		return memory
	}
	return os.TempDir()
}

// DescribeStorage describes the influence of etcd's folder on the figures.
func DescribeStorage(dir string) string {
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err == nil && fs.Type == unix.TMPFS_MAGIC {
		return fmt.Sprintf("etcd in memory (%s): its fsync costs nothing", dir)
	}
	return fmt.Sprintf("etcd on the disk of %s, with fsync", dir)
}
