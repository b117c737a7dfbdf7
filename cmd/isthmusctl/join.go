package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/membership"
)

func joinCommand() *cobra.Command {
	var t target
	var id, server, namespace string
	var blocks, pods, nodes, services []string
	cmd := &cobra.Command{
		Use:   "join BROKER-INFO",
		Short: "Make a cluster a member of the ClusterSet",
		Long: `Make a cluster a member of the ClusterSet whose deploy-broker wrote BROKER-INFO.

The cluster is registered under its id with the addresses of its pods, nodes and Services. They are found
in the cluster, as far as its nodes of now tell; where nodes will be added, give the CIDRs that cover
them. Other members accept no endpoint outside of them. Joining again keeps the ClusterSetIP blocks.`,
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
			if server != "" {
				r.Broker.Server = strings.TrimSuffix(server, "/")
			}
			if id == "" {
				return errors.New("no --clusterid; give the cluster an id that no other member has, such as its region")
			}
			err = errors.Join(
				r.ClusterID.Validate(),
				checkURL("broker-server", server),
				parse(&r.Blocks, "clusterset-ip-cidr", blocks),
				parse(&r.Addresses.Pods, "pod-cidr", pods),
				parse(&r.Addresses.Nodes, "node-cidr", nodes),
				parse(&r.Addresses.Services, "service-cidr", services),
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
	f.StringVar(&id, "clusterid", "", "the cluster's id: a-z, 0-9 and '-', or two such joined by a dot")
	f.StringVarP(&namespace, "namespace", "n", v1alpha1.DefaultNamespace, "namespace of the cluster in which Isthmus is, or will be, installed")
	f.StringSliceVar(&blocks, "clusterset-ip-cidr", nil, "blocks the cluster's ClusterSetIPs come from, one a family (default: the lowest free ones)")
	f.StringSliceVar(&pods, "pod-cidr", nil, "CIDRs of the cluster's pods (default: those of its nodes)")
	f.StringSliceVar(&nodes, "node-cidr", nil, "CIDRs of the cluster's nodes (default: the addresses of its nodes)")
	f.StringSliceVar(&services, "service-cidr", nil, "CIDRs of the cluster's Services (default: its ServiceCIDRs)")
	f.StringVar(&server, "broker-server", "", "URL at which this cluster reaches the broker (default: that of BROKER-INFO)")
	return cmd
}

// parse sets cidrs from what a flag holds, and leaves it nil when the flag was not given.
func parse(cidrs *[]netip.Prefix, flag string, texts []string) error {
	if len(texts) == 0 {
		return nil
	}
	var err error
	if *cidrs, err = membership.ParseCIDRs(texts); err != nil {
		return fmt.Errorf("--%s: %w", flag, err)
	}
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
	prepare(brokerCfg, origin{address: "broker-info " + file, credentials: "broker-info " + file}, t.timeout)
	broker, err := connect(brokerCfg)
	if err != nil {
		return err
	}
	var notes []string
	if r.Broker.Server != info.Server {
		memberCfg := r.Broker.RESTConfig()
		prepare(memberCfg, origin{address: "--broker-server", credentials: "broker-info " + file}, t.timeout)
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
	for _, note := range append(j.Notes, notes...) {
		if _, err := fmt.Fprintf(cmd.ErrOrStderr(), "note: %s\n", note); err != nil {
			return err
		}
	}
	verb := "joined"
	if j.Rejoined {
		verb = "joined again"
	}
	spec := j.Member.Spec
	_, err = fmt.Fprintf(out, `cluster %s %s ClusterSet %s
  pods           %s
  nodes          %s
  services       %s
  ClusterSetIPs  %s
next: helm upgrade --install isthmus deploy/helm/isthmus --namespace %s, then %s status --wait
`,
		spec.ClusterID, verb, spec.ClusterSetID, list(spec.PodCIDRs), list(spec.NodeCIDRs), list(spec.ServiceCIDRs),
		list(spec.ClusterSetIPCIDR), r.Namespace, cmd.Root().DisplayName())
	return err
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
