package testbed

import (
	"context"
	"fmt"
	"os"
	"strings"

	"github.com/isthmus-net/isthmus/tools/process"
)

// Federate runs isthmusctl federation as an administrator of Members and the Guest, whose contexts have their
// names, and returns what it printed.
func (tb *Testbed) Federate(ctx context.Context, args ...string) (string, error) {
	var files []string
	for _, c := range append(Members(), Guest) {
		files = append(files, tb.Lab.Kubeconfig(c))
	}
	cmd := tb.Lab.FabricCommand(ctx, append([]string{tb.Program("isthmusctl"), "federation"}, args...)...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+strings.Join(files, string(os.PathListSeparator)))
	return process.Output(cmd)
}

// Kill sends SIGKILL to the first container of a pod. The kubelet starts another one.
func (tb *Testbed) Kill(ctx context.Context, member, namespace, pod string) error {
	node, id, err := tb.container(ctx, member, namespace, pod)
	if err != nil {
		return err
	}
	if _, err := tb.containerd(ctx, node, "task", "kill", "--signal", "SIGKILL", id); err != nil {
		return fmt.Errorf("kill pod %s/%s of %s: %w", namespace, pod, member, err)
	}
	return nil
}
