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
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/cmd/internal/usage"
	"github.com/isthmus-net/isthmus/cmd/isthmusctl/internal/installation"
	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker/membership"
)

// uninstallFlags are the flags of uninstall.
type uninstallFlags struct {
	target, broker       target
	namespace, release   string
	names                configNames
	plan, yes            bool
	brokerGone           bool
	definitions, abandon bool
	timeout              time.Duration
}

// uninstallation is what uninstall finds in a cluster.
type uninstallation struct {
	uninstallFlags
	cmd       *cobra.Command
	cluster   client.Client
	collector *collector
	installed *installation.Installation // nil: there is no Helm release
	// byManifest says that there are workloads that no Helm release has.
	byManifest bool
	cleaners   []installation.Cleaner
}

func uninstallCommand() *cobra.Command {
	var u uninstallFlags
	cmd := &cobra.Command{
		Use:   "uninstall",
		Short: "Remove Isthmus from a cluster and from the kernels of its nodes",
		Long: `Remove Isthmus from a cluster: the cluster leaves its ClusterSet, its DNS no longer asks the agents, the agents and gateways stop, their
programs, maps and devices are removed from the kernel of every node, and the Helm release is uninstalled. The command shows the steps and
asks for confirmation. Run it again to complete an interrupted run. Before its step "chart", isthmusctl upgrade with the installed version's
chart starts the agents and gateways again.

ServiceExports, the definitions of the MCS API, and the namespace stay. With --definitions the definitions of isthmus.dev go, and with
them all objects of these kinds.

It refuses while Services have addresses of the gateways, which only the controller can release: delete these Services first, or give
--abandon-addresses, which leaves their floating IPs and ports to you.`,
		Example: `  isthmusctl uninstall --broker-kubeconfig broker.kubeconfig --plan
  isthmusctl uninstall --broker-kubeconfig broker.kubeconfig --kubeconfig a.kubeconfig
  isthmusctl uninstall --broker-gone --definitions --yes --context west`,
		Args: usage.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			found, err := u.open(cmd)
			if err != nil {
				return err
			}
			return found.run()
		},
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
	f.BoolVar(&u.brokerGone, "broker-gone", false, "leave a ClusterSet whose broker no longer exists")
	f.BoolVar(&u.definitions, "definitions", false, "delete the definitions of isthmus.dev too, with all objects of these kinds")
	f.BoolVar(&u.abandon, "abandon-addresses", false, "leave the floating IPs and ports of Services and gateways in the cloud")
	f.DurationVar(&u.timeout, "timeout", 5*time.Minute, "the longest time to wait for pods, in each step")
}

// open reads the cluster.
func (u *uninstallFlags) open(cmd *cobra.Command) (*uninstallation, error) {
	patient := u.target
	patient.timeout = u.timeout + time.Minute // Helm watches until pods are gone
	cfg, _, err := patient.config()
	if err != nil {
		return nil, err
	}
	found := &uninstallation{uninstallFlags: *u, cmd: cmd}
	if found.installed, err = installation.Open(cfg, u.namespace, u.release); err != nil && !errors.Is(err, installation.ErrNotFound) {
		return nil, err
	}
	clients, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return nil, err
	}
	if found.collector, err = u.target.collector(u.namespace); err != nil {
		return nil, err
	}
	found.cluster = found.collector.client
	for _, component := range []string{"agent", "gateway"} {
		found.cleaners = append(found.cleaners, installation.Cleaner{Cluster: clients, Namespace: u.namespace, Component: component, Timeout: u.timeout})
	}
	if found.installed == nil {
		found.byManifest, err = otherWorkloads(cmd.Context(), found.cluster, u.namespace, u.release)
	}
	return found, err
}

// run shows the steps, asks, and does them. Nodes that cannot be cleaned do not keep it from the other steps.
func (u *uninstallation) run() error {
	steps, err := u.steps()
	if err != nil {
		return err
	}
	out := u.cmd.OutOrStdout()
	for _, s := range steps {
		fmt.Fprintf(out, "%s: %s\n", s.name, s.what)
	}
	fmt.Fprintf(out, "stays: %s\n", u.staying())
	if u.plan {
		return nil
	}
	for _, s := range steps {
		if s.refused != nil {
			return s.refused
		}
	}
	if err := confirm(u.cmd, u.yes, "Uninstall?"); err != nil {
		return err
	}
	left := &installation.NodesError{}
	for _, s := range steps {
		if s.do == nil {
			continue
		}
		start := time.Now()
		err := s.do(u.cmd.Context())
		if nodes := (*installation.NodesError)(nil); errors.As(err, &nodes) {
			left.Nodes = append(left.Nodes, nodes.Nodes...)
			err = nil
		}
		if err != nil {
			return fmt.Errorf("%s: %w; mend that and run the command again, it continues", s.name, err)
		}
		fmt.Fprintf(u.cmd.ErrOrStderr(), "%s: done in %s\n", s.name, time.Since(start).Round(time.Second))
	}
	if len(left.Nodes) > 0 {
		return left
	}
	done := "Isthmus is uninstalled"
	if u.byManifest {
		done = "next: kubectl delete -f isthmus.yaml, which removes what kubectl applied"
	}
	_, err = fmt.Fprintln(out, done)
	return err
}

// staying lists what stays.
func (u *uninstallation) staying() string {
	all := fmt.Sprintf("namespace %s with other Secrets and ConfigMaps, state folders of nodes (/var/lib/isthmus*), ServiceExports, the definitions of the MCS API and of ClusterProperty", u.namespace)
	if u.definitions {
		return all
	}
	return all + " and of isthmus.dev (--definitions deletes the latter)"
}

// removal is a step of an uninstallation.
type removal struct {
	name, what string
	do         func(context.Context) error // nil: there is nothing to do
	refused    error                       // why the command does nothing at all, as it was given
}

// refuse returns s as a step that cannot be done.
func (s removal) refuse(format string, args ...any) removal {
	s.refused = fmt.Errorf(format, args...)
	s.what = "refused: " + s.refused.Error()
	return s
}

// steps returns what is to be done, in its order.
func (u *uninstallation) steps() ([]removal, error) {
	ctx := u.cmd.Context()
	var steps []removal
	for _, plan := range []func(context.Context) (removal, error){u.federation, u.leave, u.dns} {
		s, err := plan(ctx)
		if err != nil {
			return nil, err
		}
		steps = append(steps, s)
	}
	for _, c := range u.cleaners {
		s, err := cleanup(ctx, c, u.cmd.ErrOrStderr())
		if err != nil {
			return nil, err
		}
		steps = append(steps, s)
	}
	// Only after its controller is gone nobody takes an address again.
	for _, plan := range []func(context.Context) (removal, error){u.chart, u.addresses, u.deleteDefinitions} {
		s, err := plan(ctx)
		if err != nil {
			return nil, err
		}
		steps = append(steps, s)
	}
	return steps, nil
}

// federation refuses a cluster that is in a federation.
func (u *uninstallation) federation(ctx context.Context) (removal, error) {
	s := removal{name: "federation", what: "the cluster is in none"}
	err := u.cluster.Get(ctx, client.ObjectKey{Name: federationv1alpha1.FederationName}, &federationv1alpha1.Federation{})
	switch {
	case err == nil:
		return s.refuse("the cluster is in a federation; remove it first: isthmusctl federation remove ID"), nil
	case isAbsent(err):
		return s, nil
	}
	return s, fmt.Errorf("read the Federation: %w", err)
}

// leave is the step that ends the membership.
func (u *uninstallation) leave(ctx context.Context) (removal, error) {
	s := removal{name: "membership", what: "the cluster is not a member of a ClusterSet"}
	members := &v1alpha1.MemberList{}
	if err := u.cluster.List(ctx, members, client.InNamespace(u.namespace)); err != nil && !isAbsent(err) {
		return s, fmt.Errorf("list Members: %w", err)
	}
	if len(members.Items) == 0 {
		return s, nil
	}
	m := members.Items[0].Spec
	s.what = fmt.Sprintf("cluster %s leaves ClusterSet %s", m.ClusterID, m.ClusterSetID)
	given := u.broker.kubeconfig != "" || u.broker.context != ""
	switch {
	case u.brokerGone && given:
		return s.refuse("give one of --broker-kubeconfig and --broker-gone"), nil
	case u.brokerGone:
		s.what += ", whose broker is gone"
		s.do = func(ctx context.Context) error {
			left, err := membership.LeaveLostBroker(ctx, u.cluster, u.namespace)
			if err != nil {
				return err
			}
			return printLeft(u.cmd, left, "")
		}
		return s, nil
	case !given:
		return s.refuse("the cluster is member %s of ClusterSet %s: give --broker-kubeconfig, so that it leaves first, and the others learn of it at once; or --broker-gone, if the broker no longer exists",
			m.ClusterID, m.ClusterSetID), nil
	}
	broker, err := u.broker.broker(u.cmd, u.target)
	if err != nil {
		return s, err
	}
	s.do = func(ctx context.Context) error {
		left, err := membership.Leave(ctx, broker, u.cluster, u.namespace)
		if err != nil {
			return explainBroker(err, u.broker)
		}
		return printLeft(u.cmd, left, "")
	}
	return s, nil
}

// dns is the step that removes the server block of dns install.
func (u *uninstallation) dns(ctx context.Context) (removal, error) {
	s := removal{name: "DNS", what: "no Corefile has a server block of Isthmus"}
	all, err := u.names.configs()
	if err != nil {
		return s, err
	}
	configs, err := readConfigs(ctx, u.cluster, all)
	if errors.Is(err, errNoCorefile) {
		s.what = fmt.Sprintf("there is no ConfigMap %s or %s; if isthmusctl dns install was given another one, give the same --coredns or --node-local-dns", all[0].key, all[1].key)
		return s, nil
	}
	if err != nil {
		return s, err
	}
	var names []string
	for _, c := range configs {
		if want, err := uninstalling(c); err == nil && want != c.text {
			names = append(names, "ConfigMap "+c.key.String())
		}
	}
	if len(names) == 0 {
		return s, nil
	}
	s.what = "remove the server block for clusterset.local from " + strings.Join(names, " and ")
	s.do = func(context.Context) error {
		d := dnsFlags{target: u.target, namespace: u.namespace, names: u.names}
		_, err := d.uninstall(u.cmd, u.collector, configs, changeFlags{yes: true, wait: true, timeout: u.timeout})
		return err
	}
	return s, nil
}

// cleanup is the step that cleans the kernels of nodes.
func cleanup(ctx context.Context, c installation.Cleaner, out io.Writer) (removal, error) {
	s := removal{name: c.Component + "s", what: fmt.Sprintf("not installed; what earlier ones left in the kernel of a node, isthmus-%s cleanup removes there", c.Component)}
	set, err := c.DaemonSet(ctx)
	if set == nil || err != nil {
		return s, err
	}
	s.what = fmt.Sprintf("stop DaemonSet %s, and remove its programs, maps and devices from the kernel of each of its nodes", set.Name)
	s.do = func(ctx context.Context) error {
		n, err := c.Clean(ctx)
		fmt.Fprintf(out, "%s: %d nodes cleaned\n", s.name, n)
		return err
	}
	return s, nil
}

// chart is the step that uninstalls the Helm release.
func (u *uninstallation) chart(context.Context) (removal, error) {
	s := removal{name: "chart", what: fmt.Sprintf("there is no Helm release %s in namespace %s", u.release, u.namespace)}
	switch {
	case u.byManifest:
		s.what += "; what kubectl applied, kubectl deletes afterwards: kubectl delete -f isthmus.yaml"
	case u.installed != nil:
		s.what = fmt.Sprintf("uninstall Helm release %s, revision %d", u.release, u.installed.Revision)
		s.do = func(ctx context.Context) error {
			kept, err := u.installed.Uninstall(ctx, u.timeout)
			if kept != "" {
				fmt.Fprintln(u.cmd.ErrOrStderr(), strings.TrimSpace(kept))
			}
			return err
		}
	}
	return s, nil
}

// isAbsent reports whether err means that an object or its kind does not exist.
func isAbsent(err error) bool { return meta.IsNoMatchError(err) || apierrors.IsNotFound(err) }
