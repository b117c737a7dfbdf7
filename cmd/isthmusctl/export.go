package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/controller-runtime/pkg/client"
	mcsv1beta1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker/membership"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

func exportCommand() *cobra.Command {
	cmd := parentCommand("export", "exported", "Export a Service to the ClusterSet")
	var useIP bool
	service := serviceCommand("Make a Service reachable from every cluster of the ClusterSet",
		"isthmusctl export service hello -n demo", func(cmd *cobra.Command, c client.Client, key client.ObjectKey) error {
			asks := ""
			if cmd.Flags().Changed("use-clusterset-ip") {
				asks = strconv.FormatBool(useIP)
			}
			return export(cmd, c, key, asks)
		})
	service.Flags().BoolVar(&useIP, "use-clusterset-ip", true, "request a ClusterSetIP, or decline one (default: as set for the cluster)")
	service.Flags().Lookup("use-clusterset-ip").DefValue = "" // the text has it
	cmd.AddCommand(service)
	return cmd
}

func unexportCommand() *cobra.Command {
	cmd := parentCommand("unexport", "unexported", "Withdraw a Service from the ClusterSet")
	cmd.AddCommand(serviceCommand("Stop exporting a Service from this cluster",
		"isthmusctl unexport service hello -n demo", unexport))
	return cmd
}

// parentCommand returns a command whose only subcommand is service.
func parentCommand(verb, done, short string) *cobra.Command {
	return &cobra.Command{
		Use:     verb,
		Short:   short,
		Example: "  isthmusctl " + verb + " service hello -n demo",
		// The flags belong to the subcommand; without it they are not the fault.
		FParseErrWhitelist: cobra.FParseErrWhitelist{UnknownFlags: true},
		RunE: func(cmd *cobra.Command, args []string) error {
			right := cmd.CommandPath() + " service NAME -n NAMESPACE"
			if len(args) == 0 {
				return fmt.Errorf("%s needs a kind: %s", verb, right)
			}
			return fmt.Errorf("%q cannot be %s, only a service can: %s", args[0], done, right)
		},
		Args: cobra.ArbitraryArgs,
	}
}

// serviceCommand returns a command on one Service.
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
			key := client.ObjectKey{Namespace: cmp.Or(namespace, current), Name: args[0]}
			if err := checkNames(key); err != nil {
				return err
			}
			c, err := connect(cfg)
			if err != nil {
				return err
			}
			return do(cmd, c, key)
		},
	}
	t.bind(cmd.Flags())
	t.bindTimeout(cmd.Flags())
	cmd.Flags().StringVarP(&namespace, "namespace", "n", "", "namespace of the Service (default: that of the context)")
	return cmd
}

// checkNames refuses invalid names of Services and namespaces.
func checkNames(key client.ObjectKey) error {
	for _, n := range []struct{ kind, name string }{{"Service", key.Name}, {"namespace", key.Namespace}} {
		if len(validation.IsDNS1123Label(n.name)) > 0 {
			return fmt.Errorf("%q cannot be the name of a %s; use a-z, 0-9 and '-', at most 63 characters, with a letter or digit at both ends", n.name, n.kind)
		}
	}
	return nil
}

// isMissingNamespace reports whether err is that of creating an object in a namespace that does not exist.
func isMissingNamespace(err error) bool {
	var status apierrors.APIStatus
	return apierrors.IsNotFound(err) && errors.As(err, &status) && status.Status().Details != nil && status.Status().Details.Kind == "namespaces"
}

// export creates the ServiceExport. The Service need not exist yet. useIP is "true" or "false" to request or decline a
// ClusterSetIP, or empty.
func export(cmd *cobra.Command, c client.Client, key client.ObjectKey, useIP string) error {
	if !clusterset.IsShared(key.Namespace) {
		return fmt.Errorf("namespace %s is restricted and is not exported", key.Namespace)
	}
	ctx := cmd.Context()
	err := c.Get(ctx, key, &corev1.Service{})
	missing := apierrors.IsNotFound(err)
	if err != nil && !missing {
		return fmt.Errorf("read Service %s: %w", key, err)
	}
	wanted := &mcsv1beta1.ServiceExport{ObjectMeta: metav1.ObjectMeta{Namespace: key.Namespace, Name: key.Name}}
	if useIP != "" {
		metav1.SetMetaDataAnnotation(&wanted.ObjectMeta, v1alpha1.AnnotationUseClusterSetIP, useIP)
	}
	err = c.Create(ctx, wanted)
	switch {
	case apierrors.IsAlreadyExists(err):
		return exportAgain(cmd, c, key, useIP)
	case meta.IsNoMatchError(err):
		return noKind(ctx, c, err)
	case isMissingNamespace(err):
		return fmt.Errorf("namespace %s does not exist; create it with kubectl create namespace %s, or give another one with --namespace", key.Namespace, key.Namespace)
	case err != nil:
		return fmt.Errorf("write ServiceExport %s: %w", key, err)
	}
	if missing {
		if _, err := fmt.Fprintf(cmd.ErrOrStderr(), "note: Service %s does not exist yet; it is exported when it does\n", key); err != nil {
			return err
		}
	}
	_, err = fmt.Fprintf(cmd.OutOrStdout(), "exported Service %s as %s.%s.svc.clusterset.local\n", key, key.Name, key.Namespace)
	return err
}

// exportAgain changes the request for a ClusterSetIP of an exported Service, if useIP is not empty.
func exportAgain(cmd *cobra.Command, c client.Client, key client.ObjectKey, useIP string) error {
	have := &mcsv1beta1.ServiceExport{}
	if err := c.Get(cmd.Context(), key, have); err != nil {
		return fmt.Errorf("read ServiceExport %s: %w", key, err)
	}
	if useIP == "" || have.Annotations[v1alpha1.AnnotationUseClusterSetIP] == useIP {
		_, err := fmt.Fprintf(cmd.OutOrStdout(), "Service %s is already exported\n", key)
		return err
	}
	patched := have.DeepCopy()
	metav1.SetMetaDataAnnotation(&patched.ObjectMeta, v1alpha1.AnnotationUseClusterSetIP, useIP)
	if err := c.Patch(cmd.Context(), patched, client.MergeFrom(have)); err != nil {
		return fmt.Errorf("write ServiceExport %s: %w", key, err)
	}
	note := fmt.Sprintf("the first export decided whether Service %s has a ClusterSetIP; to change it, unexport it in all clusters and export it again", key)
	if err := printNotes(cmd, note); err != nil {
		return err
	}
	_, err := fmt.Fprintf(cmd.OutOrStdout(), "Service %s is already exported; its annotation use-clusterset-ip is %s now\n", key, useIP)
	return err
}

// noKind explains that a cluster does not serve the version of a kind that isthmusctl writes: it may serve an older one.
func noKind(ctx context.Context, c client.Client, err error) error {
	old, oldErr := membership.OldDefinitions(ctx, c)
	if oldErr != nil {
		return err
	}
	for _, d := range old {
		if len(d.Lacks) > 0 && strings.HasPrefix(d.Name, "serviceexports.") {
			return fmt.Errorf("%s; run isthmusctl upgrade --apply, which updates it", d)
		}
	}
	return err
}

// unexport deletes the ServiceExport. It succeeds without one.
func unexport(cmd *cobra.Command, c client.Client, key client.ObjectKey) error {
	err := c.Delete(cmd.Context(), &mcsv1beta1.ServiceExport{ObjectMeta: metav1.ObjectMeta{Namespace: key.Namespace, Name: key.Name}})
	switch {
	case meta.IsNoMatchError(err):
		return noKind(cmd.Context(), c, err)
	case apierrors.IsNotFound(err):
		_, err = fmt.Fprintf(cmd.OutOrStdout(), "Service %s is not exported\n", key)
		return err
	case err != nil:
		return fmt.Errorf("delete ServiceExport %s: %w", key, err)
	}
	_, err = fmt.Fprintf(cmd.OutOrStdout(), "unexported Service %s; its endpoints in this cluster are withdrawn from the ClusterSet\n", key)
	return err
}
