package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker/membership"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

func joinCommand() *cobra.Command {
	var t target
	var id, server, namespace string
	var blocks, pods, nodes, services, extra []string
	var enabled bool
	cmd := &cobra.Command{
		Use:   "join BROKER-INFO",
		Short: "Make a cluster a member of the ClusterSet",
		Long: `Make a cluster a member of the ClusterSet whose deploy-broker wrote BROKER-INFO.

The cluster is registered under its id with the addresses of its pods, nodes and Services. They are found
in the cluster: in what is configured for it as a whole, where that can be known, and in its nodes of now.
Other members accept no endpoint outside of them, so where nodes will be added, see that they are covered.
The id is that of the cluster's ClusterProperty cluster.clusterset.k8s.io, if it has one; else join sets it.

Joining again keeps the ClusterSetIP blocks and all that flags said before, finds the rest anew, and takes
the ClusterSet's settings over. A flag with an empty value forgets what it said before.`,
		Example: `  isthmusctl join broker-info.yaml --kubeconfig a.kubeconfig --clusterid a
  isthmusctl join broker-info.yaml --kubeconfig a.kubeconfig --clusterid a --pod-cidr 10.1.0.0/16 --node-cidr 192.0.2.0/24`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return fmt.Errorf("join needs one argument, the file that deploy-broker wrote; it got %d", len(args))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			info, err := membership.ReadBrokerInfo(args[0])
			if err != nil {
				return err
			}
			r := membership.Request{ClusterID: clusterset.ClusterID(id), Broker: info, Namespace: namespace}
			if cmd.Flags().Changed("broker-server") {
				r.Server = new(strings.TrimSuffix(server, "/"))
			}
			if cmd.Flags().Changed("enable-clusterset-ip") {
				r.ClusterSetIPEnabled = &enabled
			}
			if id != "" || cmd.Flags().Changed("clusterid") {
				err = r.ClusterID.Validate()
			}
			err = errors.Join(
				err,
				checkURL("broker-server", server),
				parse(cmd, &r.Blocks, "clusterset-ip-cidr", blocks),
				parse(cmd, &r.Addresses.Pods, "pod-cidr", pods),
				parse(cmd, &r.Addresses.Nodes, "node-cidr", nodes),
				parse(cmd, &r.Addresses.Services, "service-cidr", services),
				parse(cmd, &r.Addresses.Extra, "extra-cidr", extra),
				info.Check(time.Now()),
			)
			if err != nil {
				return err
			}
			return join(cmd, t, info, args[0], r)
		},
	}
	f := cmd.Flags()
	t.bind(f)
	t.bindTimeout(f)
	f.StringVar(&id, "clusterid", "", "the cluster's id: a-z, 0-9 and '-', or two such joined by a dot (default: that of its ClusterProperty)")
	f.StringVarP(&namespace, "namespace", "n", v1alpha1.DefaultNamespace, "namespace of the cluster in which Isthmus is, or will be, installed")
	f.StringSliceVar(&blocks, "clusterset-ip-cidr", nil, "blocks the cluster's ClusterSetIPs come from, one a family (default: the lowest free ones)")
	f.BoolVar(&enabled, "enable-clusterset-ip", true, "give Services exported here a ClusterSetIP without being asked (default: as the ClusterSet does)")
	f.Lookup("enable-clusterset-ip").DefValue = "" // it stands in the text
	bindAddresses(f, &pods, &nodes, &services, &extra, "found in the cluster")
	f.StringVar(&server, "broker-server", "", "URL at which this cluster reaches the broker (default: that of BROKER-INFO)")
	return cmd
}

// bindAddresses binds the flags of a member's addresses. otherwise says where they come from by default.
func bindAddresses(f *pflag.FlagSet, pods, nodes, services, extra *[]string, otherwise string) {
	f.StringSliceVar(pods, "pod-cidr", nil, "CIDRs of the cluster's pods (default: "+otherwise+")")
	f.StringSliceVar(nodes, "node-cidr", nil, "CIDRs of the cluster's nodes (default: "+otherwise+")")
	f.StringSliceVar(services, "service-cidr", nil, "CIDRs of the cluster's Services (default: "+otherwise+")")
	f.StringSliceVar(extra, "extra-cidr", nil, "further CIDRs of endpoints, such as those of virtual machines")
}

// parse sets cidrs from what a flag holds: nil when it was not given, and empty when it was given without any.
func parse(cmd *cobra.Command, cidrs *[]netip.Prefix, flag string, texts []string) error {
	if !cmd.Flags().Changed(flag) {
		return nil
	}
	parsed, err := membership.ParseCIDRs(texts)
	if err != nil {
		return fmt.Errorf("--%s: %w", flag, err)
	}
	*cidrs = append([]netip.Prefix{}, parsed...)
	return nil
}

func join(cmd *cobra.Command, t target, info membership.BrokerInfo, file string, r membership.Request) error {
	cfg, _, err := t.config()
	if err != nil {
		return err
	}
	member, err := connect(cfg)
	if err != nil {
		return err
	}
	brokerCfg := info.RESTConfig()
	prepare(brokerCfg, origin{address: "broker-info " + file, credentials: "broker-info " + file, fix: renewInfo}, t.timeout)
	broker, err := connect(brokerCfg)
	if err != nil {
		return err
	}
	var notes []string
	if r.Server != nil && *r.Server != "" {
		elsewhere := info
		elsewhere.Server = *r.Server
		memberCfg := elsewhere.RESTConfig()
		prepare(memberCfg, origin{address: "--broker-server", credentials: "broker-info " + file, fix: renewInfo}, t.timeout)
		unanswered, err := tryBroker(cmd.Context(), memberCfg, r.Broker.Namespace)
		if err != nil {
			return err
		}
		if unanswered != nil {
			notes = []string{
				unanswered.text,
				fmt.Sprintf("so it was not checked from here, and cluster %s may not reach its broker; %s status says whether it does", r.ClusterID, cmd.Root().DisplayName()),
			}
		}
	}
	j, err := membership.Join(cmd.Context(), broker, member, r)
	if err != nil {
		return err
	}

	out := cmd.OutOrStdout()
	if err := tell(cmd, append(j.Notes, notes...)...); err != nil {
		return err
	}
	verb := "joined"
	if j.Rejoined {
		verb = "joined again"
	}
	spec := j.Member.Spec
	_, err = fmt.Fprintf(out, `cluster %s %s ClusterSet %s
%s  ClusterSetIPs  %s, given %s
next: helm upgrade --install isthmus deploy/helm/isthmus --namespace %s, then %s status --wait
`,
		spec.ClusterID, verb, spec.ClusterSetID, sources(j.Sources),
		list(spec.ClusterSetIPCIDR), givenHow(spec.ClusterSetIPEnabled), r.Namespace, cmd.Root().DisplayName())
	return err
}

// renewInfo says where there are other credentials than those of a broker-info file.
const renewInfo = "isthmusctl deploy-broker writes a file with others"

// sources prints addresses and where they come from, a line for each kind.
func sources(all []membership.Source) string {
	var b strings.Builder
	for _, kind := range []string{"pods", "nodes", "services", "extra"} {
		var found []string
		for _, s := range all {
			if s.Kind == kind {
				var cidrs []string
				for _, p := range s.CIDRs {
					cidrs = append(cidrs, p.String())
				}
				found = append(found, fmt.Sprintf("%s (%s)", strings.Join(cidrs, ", "), s.From))
			}
		}
		if len(found) > 0 || kind != "extra" {
			fmt.Fprintf(&b, "  %-13s  %s\n", kind, list(found))
		}
	}
	return b.String()
}

// givenHow says when an exported Service gets a ClusterSetIP.
func givenHow(enabled bool) string {
	if enabled {
		return "without asking"
	}
	return "on request"
}

// tryBroker asks for the broker in a namespace of the server behind cfg. A server that answers and is another
// one is an error. One that does not answer is none, because the member may have another way to it.
func tryBroker(ctx context.Context, cfg *rest.Config, namespace string) (*noAnswer, error) {
	c, err := connect(cfg)
	if err != nil {
		return nil, err
	}
	key := client.ObjectKey{Namespace: namespace, Name: v1alpha1.ClusterSetConfigName}
	err = c.Get(ctx, key, &v1alpha1.ClusterSetConfig{})
	var unanswered *noAnswer
	switch {
	case err == nil:
		return nil, nil
	case errors.As(err, &unanswered) && !unanswered.heard:
		return unanswered, nil
	case meta.IsNoMatchError(err), apierrors.IsNotFound(err), apierrors.IsForbidden(err):
		return nil, fmt.Errorf("API server %s of --broker-server is not the broker: it shows no ClusterSetConfig %s; correct the address", cfg.Host, key)
	}
	return nil, fmt.Errorf("ask for the broker at %s: %w", cfg.Host, err)
}

func list(items []string) string {
	if len(items) == 0 {
		return "none"
	}
	return strings.Join(items, ", ")
}
