package compile

import (
	"context"
	"fmt"
	"strings"

	"github.com/isthmus-net/isthmus/tools/process"
)

// Helm returns the path of the pinned Helm (tools/helm), an executable in the build cache, and builds it first if necessary. root is that of
// the repository. `go tool` would compile Helm with other flags, and again all that it shares with our programs and Kubernetes.
func Helm(ctx context.Context, root string) (path string, err error) {
	for _, runner := range []string{"true", "echo"} { // only from the second time on, go runs the executable in the cache
		run := Go(ctx, "run", "-exec="+runner, "-modfile=tools/helm/go.mod", "helm.sh/helm/v4/cmd/helm")
		run.Dir = root
		if path, err = process.Output(run); err != nil {
			return "", fmt.Errorf("build Helm: %w", err)
		}
	}
	return strings.TrimSpace(path), nil
}
