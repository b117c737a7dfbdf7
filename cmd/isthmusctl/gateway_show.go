package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/isthmus-net/isthmus/cmd/internal/tables"
	"github.com/isthmus-net/isthmus/gateway/api/v1alpha1"
	"github.com/isthmus-net/isthmus/gateway/controller"
	"github.com/isthmus-net/isthmus/gateway/service"
)

func gatewayShowCommand() *cobra.Command {
	var t target
	var format string
	cmd := &cobra.Command{
		Use:   "show [NAMESPACE | NAMESPACE/NAME]",
		Short: "Show the gateways, and the Services that they serve",
		Long: `Show the gateways, and the Services that they serve, with what is wrong with each.

All comes from the statuses of GatewayNodes and Services, as the gateway controller wrote them last. The command needs the
rights to list both. isthmusctl gateway explain says more about one Service.`,
		Example: `  isthmusctl gateway show
  isthmusctl gateway show shop/web
  isthmusctl gateway show shop -o json`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 1 {
				return fmt.Errorf("show takes one argument at most, NAMESPACE or NAMESPACE/NAME; it got %d", len(args))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := tables.CheckFormat(format); err != nil {
				return err
			}
			only, err := parseScope(args)
			if err != nil {
				return err
			}
			api, err := t.connect()
			if err != nil {
				return err
			}
			v, err := readGatewayView(cmd.Context(), api, only)
			if err != nil {
				return err
			}
			if format == "json" {
				return writeJSON(cmd.OutOrStdout(), v)
			}
			return v.writeText(cmd.OutOrStdout())
		},
	}
	f := cmd.Flags()
	f.StringVarP(&format, "output", "o", "text", "text or json")
	t.bind(f)
	t.bindTimeout(f)
	return cmd
}

// parseScope parses an optional NAMESPACE or NAMESPACE/NAME; what is missing is empty.
func parseScope(args []string) (only client.ObjectKey, err error) {
	if len(args) == 0 {
		return only, nil
	}
	var named bool
	if only.Namespace, only.Name, named = strings.Cut(args[0], "/"); named {
		return only, checkNames(only)
	}
	return only, checkNames(client.ObjectKey{Namespace: only.Namespace, Name: "any"})
}

// gatewayView is the result of gateway show.
type gatewayView struct {
	Gateways gatewayRows        `json:"gateways"`
	Services gatewayServiceRows `json:"services"`
}

// readGatewayView reads all gateways, and the Services of a namespace and a name, or all.
func readGatewayView(ctx context.Context, api client.Client, only client.ObjectKey) (*gatewayView, error) {
	nodes, err := gatewayNodes(ctx, api)
	if err != nil {
		return nil, err
	}
	v := &gatewayView{Gateways: gatewayRows{}, Services: gatewayServiceRows{}}
	for i := range nodes {
		v.Gateways = append(v.Gateways, gatewayRowOf(&nodes[i]))
	}
	var services corev1.ServiceList
	if err := api.List(ctx, &services, client.InNamespace(only.Namespace)); err != nil {
		return nil, fmt.Errorf("list services: %w", err)
	}
	for i := range services.Items {
		s := &services.Items[i]
		ours := service.Config{}.Takes(s) || controllerutil.ContainsFinalizer(s, service.Finalizer)
		if ours && (only.Name == "" || s.Name == only.Name) {
			v.Services = append(v.Services, gatewayServiceRowOf(s))
		}
	}
	return v, nil
}

// gatewayNodes lists the gateways by name.
func gatewayNodes(ctx context.Context, api client.Client) ([]v1alpha1.GatewayNode, error) {
	var nodes v1alpha1.GatewayNodeList
	err := api.List(ctx, &nodes)
	if meta.IsNoMatchError(err) {
		return nil, errors.New("the cluster does not know the kind GatewayNode; install the gateway controller, see docs/gateway-install.md")
	}
	if err != nil {
		return nil, fmt.Errorf("list gateway nodes: %w", err)
	}
	slices.SortFunc(nodes.Items, func(a, b v1alpha1.GatewayNode) int { return strings.Compare(a.Name, b.Name) })
	return nodes.Items, nil
}

// writeText prints v for people.
func (v *gatewayView) writeText(out io.Writer) error {
	err := tables.Write(out, v.Gateways, "text")
	_, newline := fmt.Fprintln(out)
	return errors.Join(err, newline, tables.Write(out, v.Services, "text"))
}

// gatewayRow is one gateway.
type gatewayRow struct {
	Gateway    string `json:"gateway"`
	Group      string `json:"group"`
	Balancer   string `json:"balancer"`
	Version    string `json:"version,omitempty"`
	Generation int64  `json:"generation"` // of the state applied last
	// CertificateNotAfter is when the certificate of the gateway's agent expires.
	CertificateNotAfter *metav1.Time `json:"certificateNotAfter,omitempty"`
	Announced           []string     `json:"announced"`
	Cordoned            bool         `json:"cordoned"`
	Leaving             bool         `json:"leaving"` // its GatewayNode is being deleted
	// Faults say what is wrong, one sentence each.
	Faults []string `json:"faults"`
}

func gatewayRowOf(n *v1alpha1.GatewayNode) gatewayRow {
	r := gatewayRow{
		Gateway: n.Name, Group: cmp.Or(n.Spec.Group, controller.DefaultGroup), Balancer: n.Spec.Balancer, Version: n.Status.Version,
		Generation: n.Status.AppliedGeneration, Announced: []string{}, Cordoned: n.Spec.Cordoned, Leaving: n.DeletionTimestamp != nil, Faults: []string{},
		CertificateNotAfter: n.Status.CertificateNotAfter,
	}
	r.Announced = append(r.Announced, n.Status.Announced...)
	r.Faults = append(r.Faults, gatewayFaults(n, func(string) bool { return true })...)
	if late := lateRenewal(n); late != "" {
		r.Faults = append(r.Faults, v1alpha1.ReasonRenewalOverdue+": "+late)
	}
	return r
}

// gatewayFaults says what is wrong with a gateway now. Names reports whether a message about refused Services counts.
func gatewayFaults(n *v1alpha1.GatewayNode, names func(message string) bool) (faults []string) {
	if len(n.Status.Conditions) == 0 {
		return []string{"the controller has not described it yet; check that isthmus-gateway-controller runs"}
	}
	for _, c := range n.Status.Conditions {
		if c.Type == v1alpha1.ConditionCertificateUpToDate {
			continue // see lateRenewal
		}
		if c.Status != metav1.ConditionTrue || c.Reason == v1alpha1.ReasonServicesRefused && names(c.Message) {
			faults = append(faults, c.Reason+": "+c.Message)
		}
	}
	return append(faults, n.Status.Drift...)
}

// lateRenewal says that the certificate of a gateway expires soon, "" if it does not. Until then, its Services are served.
func lateRenewal(n *v1alpha1.GatewayNode) string {
	if c := meta.FindStatusCondition(n.Status.Conditions, v1alpha1.ConditionCertificateUpToDate); c != nil && c.Status == metav1.ConditionFalse {
		return c.Message
	}
	return ""
}

// state says what the gateway does, and what is wrong with it.
func (r gatewayRow) state() string {
	is := "ok"
	switch {
	case r.Leaving:
		is = "leaving"
	case r.Cordoned:
		is = "cordoned"
	case len(r.Faults) > 0:
		return strings.Join(r.Faults, "; ")
	}
	return strings.Join(append([]string{is}, r.Faults...), "; ")
}

// certificateUntil returns the day on which the gateway's certificate expires, "" if it is unknown.
func (r gatewayRow) certificateUntil() string {
	if r.CertificateNotAfter == nil {
		return ""
	}
	return r.CertificateNotAfter.UTC().Format(time.DateOnly)
}

// gatewayRows implement tables.Table.
type gatewayRows []gatewayRow

// Header is part of tables.Table.
func (gatewayRows) Header() []string {
	return []string{"GATEWAY", "GROUP", "BALANCER", "GENERATION", "ANNOUNCES", "CERTIFICATE UNTIL", "STATE"}
}

// Rows is part of tables.Table.
func (t gatewayRows) Rows() [][]string {
	rows := make([][]string, len(t))
	for i, r := range t {
		rows[i] = []string{r.Gateway, r.Group, r.Balancer, fmt.Sprint(r.Generation), fmt.Sprint(len(r.Announced)), r.certificateUntil(), r.state()}
	}
	return rows
}

// Nothing is part of tables.Table.
func (gatewayRows) Nothing() string { return "the cluster has no gateways; create GatewayNodes" }

// gatewayServiceRow is one Service.
type gatewayServiceRow struct {
	Service   string   `json:"service"` // namespace/name
	Pool      string   `json:"pool,omitempty"`
	Addresses []string `json:"addresses"`
	Ports     []string `json:"ports"`
	Served    bool     `json:"served"` // as it asks
	// Reason and Message say why it is not.
	Reason  string `json:"reason,omitempty"`
	Message string `json:"message,omitempty"`
}

func gatewayServiceRowOf(s *corev1.Service) gatewayServiceRow {
	r := gatewayServiceRow{Service: s.Namespace + "/" + s.Name, Pool: controller.PoolOf(s), Addresses: []string{}, Ports: []string{}}
	for _, i := range s.Status.LoadBalancer.Ingress {
		r.Addresses = append(r.Addresses, i.IP)
	}
	for _, p := range s.Spec.Ports {
		r.Ports = append(r.Ports, fmt.Sprintf("%d/%s", p.Port, p.Protocol))
	}
	r.Reason, r.Message = unserved(s)
	r.Served = r.Reason == ""
	return r
}

// unserved returns why a Service is not served as it asks, by its conditions; "" if it is.
func unserved(s *corev1.Service) (reason, message string) {
	for _, kind := range []string{service.ConditionMapped, service.ConditionApplied} {
		c := meta.FindStatusCondition(s.Status.Conditions, kind)
		if c == nil {
			return "Waiting", "the gateway controller has not handled it yet; check that isthmus-gateway-controller runs"
		}
		if c.Status != metav1.ConditionTrue {
			return c.Reason, c.Message
		}
	}
	return "", ""
}

// gatewayServiceRows implement tables.Table.
type gatewayServiceRows []gatewayServiceRow

// Header is part of tables.Table.
func (gatewayServiceRows) Header() []string {
	return []string{"SERVICE", "POOL", "ADDRESSES", "PORTS", "STATE"}
}

// Rows is part of tables.Table.
func (t gatewayServiceRows) Rows() [][]string {
	rows := make([][]string, len(t))
	for i, r := range t {
		state := "served"
		if !r.Served {
			state = r.Reason + ": " + r.Message
		}
		rows[i] = []string{r.Service, r.Pool, strings.Join(r.Addresses, ","), strings.Join(r.Ports, ","), state}
	}
	return rows
}

// Nothing is part of tables.Table.
func (gatewayServiceRows) Nothing() string {
	return "no such Service of type LoadBalancer has the class " + service.Class
}
