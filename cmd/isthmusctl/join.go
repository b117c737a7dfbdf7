package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/cmd/internal/version"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker/membership"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// joinFlags are the flags of join.
type joinFlags struct {
	target                               target
	id, server, namespace                string
	blocks, pods, nodes, services, extra []string
	supernets                            []string
	enabled                              bool
}

func joinCommand() *cobra.Command {
	var j joinFlags
	cmd := &cobra.Command{
		Use:   "join INVITATION",
		Short: "Make a cluster a member of the ClusterSet",
		Long: `Make a cluster a member of the ClusterSet, with the file that isthmusctl invite wrote for it, or with that of
deploy-broker --admit-any-cluster.

Join registers the cluster's id and the addresses of its pods, nodes and Services. It discovers them in the
cluster's configuration, where that is possible, and in its present nodes. Other members ignore endpoints
outside of them, so make sure that they cover nodes that you will add, or give a --pod-supernet in which these get
their pod CIDRs.
The id is that of the invitation, or of the cluster's ClusterProperty cluster.clusterset.k8s.io, if it has one; else
join sets it. Join ends the invitation.

Joining again, with another invitation, keeps the ClusterSetIP blocks and the values of earlier flags, discovers the rest again, and
applies the ClusterSet's settings. A flag with an empty value discards its earlier value.`,
		Example: `  isthmusctl join invitation-a.yaml --kubeconfig a.kubeconfig
  isthmusctl join invitation-a.yaml --kubeconfig a.kubeconfig --pod-cidr 10.1.0.0/16 --node-cidr 192.0.2.0/24
  isthmusctl join broker-info.yaml --kubeconfig b.kubeconfig --clusterid b`,
		Args: oneArgument("join", "the file that isthmusctl invite wrote"),
		RunE: func(cmd *cobra.Command, args []string) error {
			info, err := membership.ReadBrokerInfo(args[0])
			if err != nil {
				return err
			}
			r, err := j.request(cmd, info)
			if err != nil {
				return err
			}
			return join(cmd, j.target, info, args[0], r)
		},
	}
	j.bind(cmd.Flags())
	return cmd
}

func (j *joinFlags) bind(f *pflag.FlagSet) {
	j.target.bind(f)
	j.target.bindTimeout(f)
	f.StringVar(&j.id, "clusterid", "", "the cluster's id: a-z, 0-9 and '-', or two such parts joined by a dot (default: that of the invitation or of its ClusterProperty)")
	f.StringVarP(&j.namespace, "namespace", "n", v1alpha1.DefaultNamespace, "installation namespace of Isthmus in the cluster, which need not exist yet")
	f.StringSliceVar(&j.blocks, "clusterset-ip-cidr", nil, "blocks of the cluster's ClusterSetIPs, one per family (default: the lowest free ones)")
	f.BoolVar(&j.enabled, "enable-clusterset-ip", true, "give Services exported here a ClusterSetIP by default (default: as in the ClusterSet)")
	f.Lookup("enable-clusterset-ip").DefValue = "" // the text has it
	bindAddresses(f, &j.pods, &j.nodes, &j.services, &j.extra, &j.supernets, "discovered in the cluster")
	f.StringVar(&j.server, "broker-server", "", "URL at which this cluster reaches the broker (default: that of INVITATION)")
}

// request validates the flags and returns the request that they describe.
func (j *joinFlags) request(cmd *cobra.Command, info membership.BrokerInfo) (membership.Request, error) {
	r := membership.Request{ClusterID: clusterset.ClusterID(j.id), Broker: info, Namespace: j.namespace}
	if cmd.Flags().Changed("broker-server") {
		r.Server = new(strings.TrimSuffix(j.server, "/"))
	}
	if cmd.Flags().Changed("enable-clusterset-ip") {
		r.ClusterSetIPEnabled = &j.enabled
	}
	var err error
	if j.id != "" || cmd.Flags().Changed("clusterid") {
		err = r.ClusterID.Validate()
	}
	return r, errors.Join(
		err,
		checkURL("broker-server", j.server),
		parse(cmd, &r.Blocks, "clusterset-ip-cidr", j.blocks),
		parse(cmd, &r.Addresses.Pods, "pod-cidr", j.pods),
		parse(cmd, &r.Addresses.Nodes, "node-cidr", j.nodes),
		parse(cmd, &r.Addresses.Services, "service-cidr", j.services),
		parse(cmd, &r.Addresses.Extra, "extra-cidr", j.extra),
		parse(cmd, &r.Addresses.Supernets, "pod-supernet", j.supernets),
		info.Check(time.Now()),
	)
}

// bindAddresses binds the flags of a member's addresses. otherwise describes their default.
func bindAddresses(f *pflag.FlagSet, pods, nodes, services, extra, supernets *[]string, otherwise string) {
	f.StringSliceVar(pods, "pod-cidr", nil, "CIDRs of the cluster's pods (default: "+otherwise+")")
	f.StringSliceVar(nodes, "node-cidr", nil, "CIDRs of the cluster's nodes (default: "+otherwise+")")
	f.StringSliceVar(services, "service-cidr", nil, "CIDRs of the cluster's Services (default: "+otherwise+")")
	f.StringSliceVar(extra, "extra-cidr", nil, "further CIDRs of endpoints, such as those of virtual machines")
	f.StringSliceVar(supernets, "pod-supernet", nil, "CIDRs of this cluster alone, in which later nodes get their pod CIDRs: its controller adds these")
}

// parse sets cidrs from a flag: nil if it was not given, and empty if it was given without values.
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
	prepare(brokerCfg, origin{address: "file " + file, credentials: "file " + file, fix: renewInfo}, t.timeout)
	broker, err := connect(brokerCfg)
	if err != nil {
		return err
	}
	var notes []string
	if r.Server != nil && *r.Server != "" {
		elsewhere := info
		elsewhere.Server = *r.Server
		memberCfg := elsewhere.RESTConfig()
		prepare(memberCfg, origin{address: "--broker-server", credentials: "file " + file, fix: renewInfo}, t.timeout)
		unanswered, err := tryBroker(cmd.Context(), memberCfg, r.Broker.Namespace)
		if err != nil {
			return err
		}
		if unanswered != nil {
			notes = []string{
				unanswered.text,
				fmt.Sprintf("so the URL is not checked, and cluster %s may not reach its broker; %s status shows whether it does", cmp.Or(string(r.ClusterID), info.ClusterID), cmd.Root().DisplayName()),
			}
		}
	}
	j, err := membership.Join(cmd.Context(), broker, member, r)
	if err != nil {
		return err
	}

	out := cmd.OutOrStdout()
	if err := printNotes(cmd, append(j.Notes, notes...)...); err != nil {
		return err
	}
	verb := "joined"
	if j.Rejoined {
		verb = "joined again"
	}
	spec := j.Member.Spec
	_, err = fmt.Fprintf(out, `cluster %s %s ClusterSet %s
%s  ClusterSetIPs  %s, allocated %s
next: helm install isthmus oci://REGISTRY/charts/isthmus --version %s --set image.registry=REGISTRY --namespace %s, unless it is installed; then %s status --wait
`,
		spec.ClusterID, verb, spec.ClusterSetID, sources(j.Sources),
		list(spec.ClusterSetIPCIDR), allocationMode(spec.ClusterSetIPEnabled), cmp.Or(version.Chart(), "VERSION"), r.Namespace, cmd.Root().DisplayName())
	return err
}

// renewInfo is the remedy for invalid credentials of an invitation or a broker-info file.
const renewInfo = "the file was used, was replaced or has expired; run isthmusctl invite on the broker, which writes another one"

// sources formats addresses with their source, one line per kind.
func sources(all []membership.Source) string {
	var b strings.Builder
	for _, kind := range []string{"pods", "nodes", "services", "extra", "supernets"} {
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
		if len(found) > 0 || kind != "extra" && kind != "supernets" {
			fmt.Fprintf(&b, "  %-13s  %s\n", kind, list(found))
		}
	}
	return b.String()
}

// allocationMode describes when an exported Service gets a ClusterSetIP.
func allocationMode(enabled bool) string {
	if enabled {
		return "by default"
	}
	return "on request"
}

// tryBroker checks that a namespace of the server behind cfg is the broker. Another server is an error. A server that does
// not answer is returned as noAnswer, because the member may reach it by another network.
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
	case errors.As(err, &unanswered) && !unanswered.reached:
		return unanswered, nil
	case isAbsent(err), apierrors.IsForbidden(err):
		return nil, fmt.Errorf("API server %s of --broker-server is not the broker: it has no ClusterSetConfig %s; correct the address", cfg.Host, key)
	}
	return nil, fmt.Errorf("read the broker at %s: %w", cfg.Host, err)
}

func list(items []string) string {
	if len(items) == 0 {
		return "none"
	}
	return strings.Join(items, ", ")
}
