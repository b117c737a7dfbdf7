package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/isthmus-net/isthmus/cmd/internal/usage"
	"github.com/isthmus-net/isthmus/cmd/isthmusctl/internal/installation"
	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker/membership"
	gatewayv1alpha1 "github.com/isthmus-net/isthmus/gateway/api/v1alpha1"
	gatewayservice "github.com/isthmus-net/isthmus/gateway/service"
)

// uninstallFlags are the flags of uninstall.
type uninstallFlags struct {
	target, broker  target
	namespace       string
	release         string
	names           configNames
	plan, yes       bool
	definitions     bool
	abandon         bool
	timeout         time.Duration
	cluster         client.Client
	kubernetes      kubernetes.Interface
	installed       *installation.Installation
	member          *v1alpha1.Member // nil: the cluster is no member
	configs         []*loadedConfig  // with a server block of dns install
	collector       *collector
	agent, gateways installation.Cleaner
}

func uninstallCommand() *cobra.Command {
	var u uninstallFlags
	cmd := &cobra.Command{
		Use:   "uninstall",
		Short: "Remove Isthmus from a cluster and from the kernels of its nodes",
		Long: `Remove Isthmus from a cluster: the cluster leaves its ClusterSet, its DNS no longer asks the agents, the agents and gateways stop, their
programs, maps and devices are removed from the kernel of every node, and the Helm release is uninstalled. The command shows the steps and
asks for confirmation. Run it again to complete an interrupted run.

ServiceExports, the definitions of the MCS API, and the namespace stay. With --definitions the definitions of isthmus.dev go, and with
them all objects of these kinds.

It refuses while Services have addresses of the gateways, which only the controller can release: delete these Services first, or give
--abandon-addresses, which leaves their floating IPs and ports to you.`,
		Example: `  isthmusctl uninstall --broker-kubeconfig broker.kubeconfig --plan
  isthmusctl uninstall --broker-kubeconfig broker.kubeconfig --kubeconfig a.kubeconfig
  isthmusctl uninstall --definitions --yes --context west`,
		Args: usage.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return u.run(cmd) },
	}
	u.bind(cmd.Flags())
	return cmd
}

func (u *uninstallFlags) bind(f *pflag.FlagSet) {
	u.target.bind(f)
	u.broker.bindBroker(f)
	f.StringVarP(&u.namespace, "namespace", "n", v1alpha1.DefaultNamespace, "namespace in which Isthmus is installed")
	f.StringVar(&u.release, "release", "isthmus", "name of the Helm release")
	f.StringVar(&u.names.coreDNS, "coredns", usualCoreDNS, "NAMESPACE/NAME of the ConfigMap with CoreDNS's Corefile")
	f.StringVar(&u.names.nodeLocal, "node-local-dns", usualNodeLocal, "NAMESPACE/NAME of the ConfigMap with NodeLocal DNSCache's Corefile")
	f.BoolVar(&u.plan, "plan", false, "show the steps, and change nothing")
	f.BoolVarP(&u.yes, "yes", "y", false, "do not ask for confirmation")
	f.BoolVar(&u.definitions, "definitions", false, "delete the definitions of isthmus.dev too, with all objects of these kinds")
	f.BoolVar(&u.abandon, "abandon-addresses", false, "leave the floating IPs and ports of Services and gateways in the cloud")
	f.DurationVar(&u.timeout, "timeout", 5*time.Minute, "the longest time to wait for pods, in each step")
}

func (u *uninstallFlags) run(cmd *cobra.Command) error {
	if err := u.open(cmd.Context()); err != nil {
		return err
	}
	steps, err := u.steps(cmd)
	if err != nil {
		return err
	}
	out := cmd.OutOrStdout()
	for _, s := range steps {
		fmt.Fprintf(out, "%s: %s\n", s.name, s.what)
	}
	fmt.Fprintf(out, "stays: namespace %s, ServiceExports, the definitions of the MCS API and of ClusterProperty%s\n", u.namespace, u.staying())
	if u.plan {
		return nil
	}
	if err := confirm(cmd, u.yes, "Uninstall?"); err != nil {
		return err
	}
	for _, s := range steps {
		if s.do == nil {
			continue
		}
		start := time.Now()
		if err := s.do(cmd.Context()); err != nil {
			return fmt.Errorf("%s: %w; mend that and run the command again, it continues", s.name, err)
		}
		fmt.Fprintf(cmd.ErrOrStderr(), "%s: done in %s\n", s.name, time.Since(start).Round(time.Second))
	}
	_, err = fmt.Fprintln(out, "Isthmus is uninstalled")
	return err
}

// staying completes the list of what stays.
func (u *uninstallFlags) staying() string {
	if u.definitions {
		return ""
	}
	return " and of isthmus.dev (--definitions deletes the latter)"
}

// open reads the cluster.
func (u *uninstallFlags) open(ctx context.Context) error {
	patient := u.target
	patient.timeout = u.timeout + time.Minute // Helm waits for pods
	cfg, _, err := patient.config()
	if err != nil {
		return err
	}
	if u.installed, err = installation.Open(cfg, u.namespace, u.release); err != nil && !errors.Is(err, installation.ErrNotFound) {
		return err
	}
	if u.kubernetes, err = kubernetes.NewForConfig(cfg); err != nil {
		return err
	}
	if u.collector, err = u.target.collector(u.namespace); err != nil {
		return err
	}
	u.cluster = u.collector.client
	all, err := u.names.configs()
	if err != nil {
		return err
	}
	configs, err := readConfigs(ctx, u.cluster, all)
	if err != nil && !errors.Is(err, errNoCorefile) {
		return err
	}
	for _, config := range configs {
		if want, err := uninstalling(config); err == nil && want != config.text {
			u.configs = append(u.configs, config)
		}
	}
	u.agent = installation.Cleaner{Cluster: u.kubernetes, Namespace: u.namespace, Component: "agent", Timeout: u.timeout}
	u.gateways = u.agent
	u.gateways.Component = "gateway"
	members := &v1alpha1.MemberList{}
	if err := u.cluster.List(ctx, members, client.InNamespace(u.namespace)); err != nil && !meta.IsNoMatchError(err) && !apierrors.IsNotFound(err) {
		return fmt.Errorf("list Members: %w", err)
	}
	if len(members.Items) > 0 {
		u.member = &members.Items[0]
	}
	return nil
}

// removal is a step of an uninstallation.
type removal struct {
	name, what string
	do         func(context.Context) error // nil: there is nothing to do
}

// steps returns what is to be done, in its order, or why it cannot be.
func (u *uninstallFlags) steps(cmd *cobra.Command) ([]removal, error) {
	ctx := cmd.Context()
	if err := u.checkFederation(ctx); err != nil {
		return nil, err
	}
	addresses, err := u.addresses(ctx)
	if err != nil {
		return nil, err
	}
	leave, err := u.leave(cmd)
	if err != nil {
		return nil, err
	}
	steps := []removal{leave, u.dns(cmd)}
	for _, c := range []installation.Cleaner{u.agent, u.gateways} {
		s, err := cleanup(ctx, c, cmd.ErrOrStderr())
		if err != nil {
			return nil, err
		}
		steps = append(steps, s)
	}
	definitions, err := u.deleteDefinitions(ctx)
	if err != nil {
		return nil, err
	}
	// Only after its controller is gone nobody takes an address again.
	return append(steps, u.chart(), addresses, definitions), nil
}

// checkFederation refuses a cluster that is in a federation.
func (u *uninstallFlags) checkFederation(ctx context.Context) error {
	f := &federationv1alpha1.Federation{}
	err := u.cluster.Get(ctx, client.ObjectKey{Name: federationv1alpha1.FederationName}, f)
	switch {
	case err == nil:
		return errors.New("the cluster is in a federation; remove it first: isthmusctl federation remove ID")
	case apierrors.IsNotFound(err), meta.IsNoMatchError(err):
		return nil
	}
	return fmt.Errorf("read the Federation: %w", err)
}

// leave is the step that ends the membership.
func (u *uninstallFlags) leave(cmd *cobra.Command) (removal, error) {
	s := removal{name: "membership", what: "the cluster is not a member of a ClusterSet"}
	if u.member == nil {
		return s, nil
	}
	if u.broker.kubeconfig == "" && u.broker.context == "" {
		return s, fmt.Errorf("the cluster is member %s of ClusterSet %s: give --broker-kubeconfig, so that it leaves first, and the others learn of it at once",
			u.member.Spec.ClusterID, u.member.Spec.ClusterSetID)
	}
	broker, err := u.broker.broker(cmd, u.target)
	if err != nil {
		return s, err
	}
	s.what = fmt.Sprintf("cluster %s leaves ClusterSet %s", u.member.Spec.ClusterID, u.member.Spec.ClusterSetID)
	s.do = func(ctx context.Context) error {
		left, err := membership.Leave(ctx, broker, u.cluster, u.namespace)
		if err != nil {
			return explainBroker(err, u.broker)
		}
		return printLeft(cmd, left, "")
	}
	return s, nil
}

// dns is the step that removes the server block of dns install.
func (u *uninstallFlags) dns(cmd *cobra.Command) removal {
	s := removal{name: "DNS", what: "no Corefile has a server block of Isthmus"}
	if len(u.configs) == 0 {
		return s
	}
	var names []string
	for _, c := range u.configs {
		names = append(names, "ConfigMap "+c.key.String())
	}
	s.what = "remove the server block for clusterset.local from " + strings.Join(names, " and ")
	s.do = func(context.Context) error {
		f := changeFlags{yes: true}
		_, err := f.change(cmd, u.collector, u.configs, uninstalling)
		return err
	}
	return s
}

// cleanup is the step that cleans the kernels of all nodes.
func cleanup(ctx context.Context, c installation.Cleaner, out io.Writer) (removal, error) {
	s := removal{name: c.Component + "s", what: "not installed"}
	set, err := c.DaemonSet(ctx)
	if set == nil || err != nil {
		return s, err
	}
	s.what = fmt.Sprintf("stop DaemonSet %s, and remove its programs, maps and devices from the kernel of every node", set.Name)
	s.do = func(ctx context.Context) error {
		n, err := c.Clean(ctx)
		fmt.Fprintf(out, "%s: %d nodes cleaned\n", s.name, n)
		return err
	}
	return s, nil
}

// chart is the step that uninstalls the Helm release.
func (u *uninstallFlags) chart() removal {
	if u.installed == nil {
		return removal{name: "chart", what: fmt.Sprintf("there is no Helm release %s in namespace %s; what kubectl applied, kubectl deletes: kubectl delete -f isthmus.yaml", u.release, u.namespace)}
	}
	return removal{name: "chart", what: fmt.Sprintf("uninstall Helm release %s, revision %d", u.release, u.installed.Revision), do: func(context.Context) error {
		return u.installed.Uninstall(u.timeout)
	}}
}

// addresses is the step that abandons addresses in the cloud. Without the flag it refuses if there are any.
func (u *uninstallFlags) addresses(ctx context.Context) (removal, error) {
	s := removal{name: "addresses", what: "no Service has an address of the gateways"}
	var held []client.Object
	services := &corev1.ServiceList{}
	if err := u.cluster.List(ctx, services); err != nil {
		return s, fmt.Errorf("list Services: %w", err)
	}
	for i := range services.Items {
		if o := &services.Items[i]; controllerutil.ContainsFinalizer(o, gatewayservice.Finalizer) {
			held = append(held, o)
		}
	}
	nodes := &metav1.PartialObjectMetadataList{}
	nodes.SetGroupVersionKind(gatewayv1alpha1.GroupVersion.WithKind("GatewayNodeList"))
	if err := u.cluster.List(ctx, nodes); err != nil && !meta.IsNoMatchError(err) && !apierrors.IsNotFound(err) {
		return s, fmt.Errorf("list GatewayNodes: %w", err)
	}
	for i := range nodes.Items {
		o := &nodes.Items[i]
		o.SetGroupVersionKind(gatewayv1alpha1.GroupVersion.WithKind("GatewayNode"))
		if controllerutil.ContainsFinalizer(o, gatewayv1alpha1.Finalizer) {
			held = append(held, o)
		}
	}
	if len(held) == 0 {
		return s, nil
	}
	var names []string
	for _, o := range held {
		names = append(names, strings.TrimPrefix(o.GetNamespace()+"/"+o.GetName(), "/"))
	}
	if !u.abandon {
		return s, fmt.Errorf("the gateways' controller holds addresses in the cloud for %s: delete these Services and GatewayNodes first, and it releases them; or give --abandon-addresses", strings.Join(names, ", "))
	}
	s.what = "leave the addresses of " + strings.Join(names, ", ") + " in the cloud, and let go of these objects"
	s.do = func(ctx context.Context) error {
		for _, o := range held {
			if err := u.letGo(ctx, o); err != nil {
				return err
			}
		}
		return nil
	}
	return s, nil
}

// letGo removes the finalizers of the gateways' controller from an object.
func (u *uninstallFlags) letGo(ctx context.Context, o client.Object) error {
	before, ok := o.DeepCopyObject().(client.Object)
	if !ok {
		return fmt.Errorf("%T is no object", o)
	}
	controllerutil.RemoveFinalizer(o, gatewayservice.Finalizer)
	controllerutil.RemoveFinalizer(o, gatewayv1alpha1.Finalizer)
	err := u.cluster.Patch(ctx, o, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("remove the finalizer of %s: %w", o.GetName(), err)
	}
	return nil
}

// deleteDefinitions is the step that deletes the definitions of isthmus.dev.
func (u *uninstallFlags) deleteDefinitions(ctx context.Context) (removal, error) {
	s := removal{name: "definitions", what: "stay"}
	if !u.definitions {
		return s, nil
	}
	configs := &v1alpha1.ClusterSetConfigList{}
	if err := u.cluster.List(ctx, configs); err != nil && !meta.IsNoMatchError(err) && !apierrors.IsNotFound(err) {
		return s, fmt.Errorf("list ClusterSetConfigs: %w", err)
	}
	if len(configs.Items) > 0 {
		return s, fmt.Errorf("--definitions: namespace %s of this cluster is a broker, whose members and settings would be lost; delete that namespace first if its ClusterSet has ended", configs.Items[0].Namespace)
	}
	all := &apiextensionsv1.CustomResourceDefinitionList{}
	if err := u.cluster.List(ctx, all); err != nil {
		return s, fmt.Errorf("list CustomResourceDefinitions: %w", err)
	}
	var ours []client.Object
	for i := range all.Items {
		if group := all.Items[i].Spec.Group; group == v1alpha1.GroupVersion.Group || strings.HasSuffix(group, "."+v1alpha1.GroupVersion.Group) {
			ours = append(ours, &all.Items[i])
		}
	}
	s.what = fmt.Sprintf("delete %d definitions of isthmus.dev and all objects of these kinds", len(ours))
	s.do = func(ctx context.Context) error {
		for _, o := range ours {
			if err := client.IgnoreNotFound(u.cluster.Delete(ctx, o)); err != nil {
				return fmt.Errorf("delete CustomResourceDefinition %s: %w", o.GetName(), err)
			}
		}
		return nil
	}
	return s, nil
}
