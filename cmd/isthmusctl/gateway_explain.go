package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/cmd/internal/tables"
	"github.com/isthmus-net/isthmus/cmd/internal/writers"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/gateway/controller"
)

// gatewayExplain has the flags of gateway explain.
type gatewayExplain struct {
	settings, imports, namespace, format string
	target                               target
}

func gatewayExplainCommand() *cobra.Command {
	var e gatewayExplain
	cmd := &cobra.Command{
		Use:   "explain SERVICE",
		Short: "Follow a Service from its class to the gateways that announce it, and name the first fault",
		Long: `Follow a Service from its class to the gateways that announce it: its pool and why it is not another one, its
addresses, every port with its backends, every gateway of its group, and the last warnings. The command names the first
broken link of this chain with the remedy. The exit code is 0 if all links are fine, and 1 if one is broken.

SERVICE is NAMESPACE/NAME, NAME.NAMESPACE, or an address that clients use. The controller's own code decides, from the objects
of the cluster: the command writes nothing, and asks neither OpenStack nor gateways. It needs the rights to list Services,
GatewayNodes, EndpointSlices and Nodes, and to read the Service's namespace. It finds the settings in the ConfigMap of the
chart, if it may; otherwise give them by --settings, or it cannot explain pools.`,
		Example: `  isthmusctl gateway explain shop/web
  isthmusctl gateway explain 192.0.2.17
  isthmusctl gateway explain shop/web --settings settings.yaml -o json`,
		Args: oneArgument("explain", "the Service"),
		RunE: func(cmd *cobra.Command, args []string) error { return e.run(cmd, args[0]) },
	}
	f := cmd.Flags()
	f.StringVar(&e.settings, "settings", "", "file with the settings of isthmus-gateway-controller (default: the ConfigMap of the chart)")
	f.StringVar(&e.imports, "imports", writers.Isthmus, "as for isthmus-gateway-controller: EndpointSlices of ServiceImports that it uses")
	f.StringVarP(&e.namespace, "namespace", "n", v1alpha1.DefaultNamespace, "namespace in which Isthmus is installed")
	f.StringVarP(&e.format, "output", "o", "text", "text or json")
	e.target.bind(f)
	e.target.bindTimeout(f)
	return cmd
}

func (e *gatewayExplain) run(cmd *cobra.Command, arg string) error {
	if err := tables.CheckFormat(e.format); err != nil {
		return err
	}
	managedBy, err := writers.ManagedBy(e.imports)
	if err != nil {
		return err
	}
	ref, err := parseService(arg)
	if err != nil {
		return err
	}
	var settings *controller.Settings
	if e.settings != "" {
		if settings, err = readSettings(e.settings); err != nil {
			return err
		}
	}
	api, err := e.target.connect()
	if err != nil {
		return err
	}
	x, err := e.explain(cmd.Context(), api, ref, settings, managedBy)
	if err != nil {
		return err
	}
	if e.format == "json" {
		return errors.Join(writeJSON(cmd.OutOrStdout(), x), x.err())
	}
	return errors.Join(x.writeText(cmd.OutOrStdout()), x.err())
}

// explain returns the chain of a Service. Without settings it looks for those of the chart.
func (e *gatewayExplain) explain(ctx context.Context, api client.Client, ref serviceRef, settings *controller.Settings, managedBy []string) (*chain, error) {
	if _, err := gatewayNodes(ctx, api); err != nil {
		return nil, err
	}
	if ref.vip.IsValid() {
		var err error
		if ref.key, err = servedAt(ctx, api, ref.vip); err != nil {
			return nil, err
		}
	}
	unknown := ""
	if settings == nil {
		var err error
		if settings, err = chartSettings(ctx, api, e.namespace); err != nil {
			unknown = err.Error()
		}
	}
	d, err := controller.Decide(ctx, api, settings, managedBy, ref.key)
	if err != nil {
		return nil, err
	}
	x := &chain{Service: ref.key.String(), Links: append(decisionLinks(&d, unknown), warnings(ctx, api, d.Service)...)}
	x.judge()
	return x, nil
}

// servedAt returns the Service that clients reach at an address.
func servedAt(ctx context.Context, api client.Client, addr netip.Addr) (client.ObjectKey, error) {
	var services corev1.ServiceList
	if err := api.List(ctx, &services); err != nil {
		return client.ObjectKey{}, fmt.Errorf("list services: %w", err)
	}
	var names []string
	var found client.ObjectKey
	for i := range services.Items {
		s := &services.Items[i]
		if slices.ContainsFunc(s.Status.LoadBalancer.Ingress, func(i corev1.LoadBalancerIngress) bool { return i.IP == addr.String() }) {
			found = client.ObjectKeyFromObject(s)
			names = append(names, found.String())
		}
	}
	switch len(names) {
	case 0:
		return found, fmt.Errorf("no Service of this cluster has the address %s; see isthmusctl gateway show", addr)
	case 1:
		return found, nil
	}
	return found, fmt.Errorf("several Services share the address %s; name one of %s", addr, list(names))
}

// settingsSelector is the label of the settings' ConfigMap, whose name depends on the chart's fullnameOverride, and settingsKey
// its key.
var settingsSelector = client.MatchingLabels{"app.kubernetes.io/name": "isthmus-gateway-controller"}

const settingsKey = "config.yaml"

// chartSettings reads the settings that the chart gave the gateway controller.
func chartSettings(ctx context.Context, api client.Client, namespace string) (*controller.Settings, error) {
	var all corev1.ConfigMapList
	if err := api.List(ctx, &all, client.InNamespace(namespace), settingsSelector); err != nil {
		return nil, fmt.Errorf("list ConfigMaps in namespace %s: %w", namespace, err)
	}
	if len(all.Items) != 1 {
		return nil, fmt.Errorf("namespace %s has %d ConfigMaps of the gateway controller", namespace, len(all.Items))
	}
	s, err := parseSettings([]byte(all.Items[0].Data[settingsKey]))
	if err != nil {
		return nil, fmt.Errorf("ConfigMap %s: %w", client.ObjectKeyFromObject(&all.Items[0]), err)
	}
	return s, nil
}

// warningLimit is the number of events that explain shows.
const warningLimit = 3

// warnings returns the last warnings about a Service.
func warnings(ctx context.Context, api client.Client, s *corev1.Service) (links []link) {
	var events corev1.EventList
	err := api.List(ctx, &events, client.InNamespace(s.Namespace), client.MatchingFields{"involvedObject.uid": string(s.UID), "type": corev1.EventTypeWarning})
	switch {
	case apierrors.IsForbidden(err):
		return []link{note("events", "you may not list them")}
	case err != nil:
		return []link{note("events", "%v", err)}
	}
	last := func(e corev1.Event) time.Time {
		if e.EventTime.After(e.LastTimestamp.Time) {
			return e.EventTime.Time
		}
		return e.LastTimestamp.Time
	}
	slices.SortFunc(events.Items, func(a, b corev1.Event) int { return last(b).Compare(last(a)) })
	for _, e := range events.Items[:min(len(events.Items), warningLimit)] {
		links = append(links, note("event", "%s: %s", e.Reason, strings.ReplaceAll(e.Message, "\n", " ")))
	}
	return links
}
