package main

import (
	"fmt"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/gateway/api/v1alpha1"
)

func forgetCommand() *cobra.Command {
	var t target
	cmd := &cobra.Command{
		Use:   "forget NAME",
		Short: "Free the addresses of a gateway that is off for good",
		Long: `Free the addresses of gateway NAME, which does not answer and no longer serves anything.

An address that a Service gives up is free when each gateway has confirmed that it withdrew it. A gateway that is cut off
cannot confirm, and may still serve the address for its former Service. Make sure that it is off, or that nothing routes to
it, before you run this command. It concerns the addresses that are waiting now. For a gateway that answers it does nothing.`,
		Example: "  isthmusctl gateway forget gw-2",
		Args:    oneArgument("forget", "the name of a GatewayNode"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := t.connect()
			if err != nil {
				return err
			}
			n := &unstructured.Unstructured{}
			n.SetGroupVersionKind(v1alpha1.GroupVersion.WithKind("GatewayNode"))
			n.SetName(args[0])
			patch := fmt.Sprintf(`{"metadata":{"annotations":{%q:"true"}}}`, v1alpha1.AnnotationForget)
			if err := c.Patch(cmd.Context(), n, client.RawPatch(types.MergePatchType, []byte(patch))); err != nil {
				return fmt.Errorf("annotate gateway node %s: %w", args[0], err)
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "the controller frees the addresses that wait for gateway %s\n", args[0])
			return err
		},
	}
	t.bind(cmd.Flags())
	t.bindTimeout(cmd.Flags())
	return cmd
}
