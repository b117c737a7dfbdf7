package main

import (
	"fmt"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	mcsv1beta1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"
)

func exportCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "export",
		Short:   "Export something to the ClusterSet",
		Example: "  isthmusctl export service hello -n demo",
		Args:    cobra.NoArgs,
		RunE:    func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(serviceCommand("Make a Service reachable from every cluster of the ClusterSet",
		"isthmusctl export service hello -n demo", export))
	return cmd
}

func unexportCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "unexport",
		Short:   "Take something back from the ClusterSet",
		Example: "  isthmusctl unexport service hello -n demo",
		Args:    cobra.NoArgs,
		RunE:    func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(serviceCommand("Keep a Service to its own cluster again",
		"isthmusctl unexport service hello -n demo", unexport))
	return cmd
}

// serviceCommand is a command on one Service.
func serviceCommand(short, example string, do func(*cobra.Command, client.Client, client.ObjectKey) error) *cobra.Command {
	var t target
	var namespace string
	cmd := &cobra.Command{
		Use:     "service NAME",
		Short:   short,
		Example: "  " + example,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) != 1 {
				return fmt.Errorf("%s service needs one argument, the Service's name; it got %d", cmd.Parent().Name(), len(args))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			cfg, current, err := t.config()
			if err != nil {
				return err
			}
			if namespace == "" {
				namespace = current
			}
			c, err := connect(cfg)
			if err != nil {
				return err
			}
			return do(cmd, c, client.ObjectKey{Namespace: namespace, Name: args[0]})
		},
	}
	t.bind(cmd.Flags())
	t.bindTimeout(cmd.Flags())
	cmd.Flags().StringVarP(&namespace, "namespace", "n", "", "namespace of the Service (default: that of the context)")
	return cmd
}

// export creates the ServiceExport. That the Service does not exist is no error: it may come later.
func export(cmd *cobra.Command, c client.Client, key client.ObjectKey) error {
	ctx := cmd.Context()
	err := c.Get(ctx, key, &corev1.Service{})
	switch {
	case apierrors.IsNotFound(err):
		if _, err := fmt.Fprintf(cmd.ErrOrStderr(), "note: Service %s does not exist; it is exported once it does\n", key); err != nil {
			return err
		}
	case err != nil:
		return fmt.Errorf("read Service %s: %w", key, err)
	}
	err = c.Create(ctx, &mcsv1beta1.ServiceExport{ObjectMeta: metav1.ObjectMeta{Namespace: key.Namespace, Name: key.Name}})
	switch {
	case apierrors.IsAlreadyExists(err):
		_, err = fmt.Fprintf(cmd.OutOrStdout(), "Service %s is exported already\n", key)
		return err
	case err != nil:
		return fmt.Errorf("write ServiceExport %s: %w", key, err)
	}
	_, err = fmt.Fprintf(cmd.OutOrStdout(), "exported Service %s as %s.%s.svc.clusterset.local\n", key, key.Name, key.Namespace)
	return err
}

// unexport deletes the ServiceExport. That there is none is no error.
func unexport(cmd *cobra.Command, c client.Client, key client.ObjectKey) error {
	err := c.Delete(cmd.Context(), &mcsv1beta1.ServiceExport{ObjectMeta: metav1.ObjectMeta{Namespace: key.Namespace, Name: key.Name}})
	switch {
	case apierrors.IsNotFound(err):
		_, err = fmt.Fprintf(cmd.OutOrStdout(), "Service %s is not exported\n", key)
		return err
	case err != nil:
		return fmt.Errorf("delete ServiceExport %s: %w", key, err)
	}
	_, err = fmt.Fprintf(cmd.OutOrStdout(), "unexported Service %s; this cluster's endpoints leave the ClusterSet\n", key)
	return err
}
