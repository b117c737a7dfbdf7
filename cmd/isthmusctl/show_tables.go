package main

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	discoveryv1 "k8s.io/api/discovery/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	mcsv1beta1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/cmd/internal/tables"
)

// serviceRow is one ServiceImport.
type serviceRow struct {
	Service  string   `json:"service"`
	Type     string   `json:"type"`
	IPs      []string `json:"ips"`
	Ports    []string `json:"ports"`    // "80/TCP"
	Clusters []string `json:"clusters"` // its exporters
	Ready    int      `json:"ready"`    // endpoints
	All      int      `json:"endpoints"`
	Exported bool     `json:"exported"` // from this cluster
}

type serviceRows []serviceRow

func (serviceRows) Header() []string {
	return []string{"SERVICE", "TYPE", "IPS", "PORTS", "CLUSTERS", "READY", "EXPORTED"}
}

func (s serviceRows) Rows() [][]string {
	var out [][]string
	for _, r := range s {
		out = append(out, []string{
			r.Service, r.Type, strings.Join(r.IPs, ","), strings.Join(r.Ports, ","), strings.Join(r.Clusters, ","),
			fmt.Sprintf("%d/%d", r.Ready, r.All), map[bool]string{true: "yes", false: "no"}[r.Exported],
		})
	}
	return out
}

func (serviceRows) Nothing() string { return "no Service is imported" }

// imports reads the ServiceImports of one namespace, or of all for "", and their EndpointSlices by Service.
func (c *collector) imports(ctx context.Context, namespace string) ([]mcsv1beta1.ServiceImport, map[client.ObjectKey][]discoveryv1.EndpointSlice, error) {
	imports, found := &mcsv1beta1.ServiceImportList{}, &discoveryv1.EndpointSliceList{}
	if err := c.client.List(ctx, imports, client.InNamespace(namespace)); err != nil {
		return nil, nil, fmt.Errorf("list ServiceImports: %w", err)
	}
	if err := c.client.List(ctx, found, client.InNamespace(namespace), client.HasLabels{mcsv1beta1.LabelServiceName}); err != nil {
		return nil, nil, fmt.Errorf("list EndpointSlices: %w", err)
	}
	brokers, err := c.brokers(ctx)
	if err != nil {
		return nil, nil, err
	}
	imports.Items = slices.DeleteFunc(imports.Items, func(i mcsv1beta1.ServiceImport) bool { return brokers[i.Namespace] })
	slices.SortFunc(imports.Items, func(a, b mcsv1beta1.ServiceImport) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
	})
	by := map[client.ObjectKey][]discoveryv1.EndpointSlice{}
	for _, s := range found.Items {
		key := client.ObjectKey{Namespace: s.Namespace, Name: s.Labels[mcsv1beta1.LabelServiceName]}
		by[key] = append(by[key], s)
	}
	return imports.Items, by, nil
}

func (c *collector) showServices(ctx context.Context, namespace string) (tables.Table, error) {
	imports, endpoints, err := c.imports(ctx, namespace)
	if err != nil {
		return nil, err
	}
	exports := &mcsv1beta1.ServiceExportList{}
	if err := c.client.List(ctx, exports, client.InNamespace(namespace)); err != nil {
		return nil, fmt.Errorf("list ServiceExports: %w", err)
	}
	exported := map[client.ObjectKey]bool{}
	for i := range exports.Items {
		exported[client.ObjectKeyFromObject(&exports.Items[i])] = true
	}
	rows := serviceRows{}
	for i := range imports {
		key := client.ObjectKeyFromObject(&imports[i])
		r := serviceRow{
			Service: key.String(), Type: string(imports[i].Spec.Type), IPs: slices.Clone(imports[i].Spec.IPs), Ports: []string{}, Clusters: []string{},
			Exported: exported[key],
		}
		if r.IPs == nil {
			r.IPs = []string{}
		}
		for _, p := range imports[i].Spec.Ports {
			r.Ports = append(r.Ports, fmt.Sprintf("%d/%s", p.Port, p.Protocol))
		}
		for _, cl := range imports[i].Status.Clusters {
			r.Clusters = append(r.Clusters, cl.Cluster)
		}
		slices.Sort(r.Clusters)
		for _, n := range tally(endpoints[key]) {
			r.Ready += n.ready
			r.All += n.all
		}
		rows = append(rows, r)
	}
	return rows, nil
}

// backendRow is one endpoint of one Service.
type backendRow struct {
	Service string   `json:"service"`
	Address string   `json:"address"`
	Ports   []string `json:"ports"` // "8080/TCP"
	Cluster string   `json:"cluster"`
	Node    string   `json:"node,omitempty"`
	Zone    string   `json:"zone,omitempty"`
	State   string   `json:"state"` // "ready", "terminating" or "not ready"
}

type backendRows []backendRow

func (backendRows) Header() []string {
	return []string{"SERVICE", "ADDRESS", "PORTS", "CLUSTER", "NODE", "ZONE", "STATE"}
}

func (b backendRows) Rows() [][]string {
	var out [][]string
	for _, r := range b {
		out = append(out, []string{r.Service, r.Address, strings.Join(r.Ports, ","), r.Cluster, r.Node, r.Zone, r.State})
	}
	return out
}

func (backendRows) Nothing() string { return "no imported Service has an endpoint" }

func (c *collector) showBackends(ctx context.Context, namespace string) (tables.Table, error) {
	imports, endpoints, err := c.imports(ctx, namespace)
	if err != nil {
		return nil, err
	}
	rows := backendRows{}
	for i := range imports {
		key := client.ObjectKeyFromObject(&imports[i])
		for _, s := range endpoints[key] {
			ports := []string{}
			for _, p := range s.Ports {
				if p.Port != nil && p.Protocol != nil {
					ports = append(ports, fmt.Sprintf("%d/%s", *p.Port, *p.Protocol))
				}
			}
			for _, e := range s.Endpoints {
				if len(e.Addresses) == 0 {
					continue
				}
				r := backendRow{Service: key.String(), Address: e.Addresses[0], Ports: ports, Cluster: s.Labels[mcsv1beta1.LabelSourceCluster], State: "not ready"}
				switch terminating := e.Conditions.Terminating; {
				case terminating != nil && *terminating:
					r.State = "terminating"
				case e.Conditions.Ready == nil || *e.Conditions.Ready:
					r.State = "ready"
				}
				if e.NodeName != nil {
					r.Node = *e.NodeName
				}
				if e.Zone != nil {
					r.Zone = *e.Zone
				}
				rows = append(rows, r)
			}
		}
	}
	slices.SortStableFunc(rows, func(a, b backendRow) int {
		return cmp.Or(strings.Compare(a.Service, b.Service), strings.Compare(a.Cluster, b.Cluster), compareAddr(a.Address, b.Address))
	})
	return rows, nil
}

func compareAddr(a, b string) int {
	x, errX := netip.ParseAddr(a)
	y, errY := netip.ParseAddr(b)
	if errX != nil || errY != nil {
		return strings.Compare(a, b)
	}
	return x.Compare(y)
}

// clusterRow describes one member.
type clusterRow struct {
	Cluster  string `json:"cluster"`
	State    string `json:"state"` // "this one", or a status.MemberState; "" without a leader
	Since    string `json:"since,omitempty"`
	Services int    `json:"services"` // its exports that are imported here
	Ready    int    `json:"ready"`    // endpoints
	All      int    `json:"endpoints"`
	Held     int    `json:"held"` // held exports, which vanished together
	// DrainedOn are the nodes of this cluster whose packets it does not answer.
	DrainedOn []string `json:"drainedOn"`
}

type clusterRows []clusterRow

func (clusterRows) Header() []string {
	return []string{"CLUSTER", "STATE", "SINCE", "SERVICES", "READY", "HELD", "DRAINED-ON"}
}

func (c clusterRows) Rows() [][]string {
	var out [][]string
	for _, r := range c {
		out = append(out, []string{
			r.Cluster, r.State, r.Since, strconv.Itoa(r.Services), fmt.Sprintf("%d/%d", r.Ready, r.All), strconv.Itoa(r.Held), strings.Join(r.DrainedOn, ","),
		})
	}
	return out
}

func (clusterRows) Nothing() string { return "no clusters: this one is not a member" }

func (c *collector) showClusters(ctx context.Context) (tables.Table, error) {
	report, err := c.collect(ctx)
	if err != nil {
		return nil, err
	}
	imports, endpoints, err := c.imports(ctx, "")
	if err != nil {
		return nil, err
	}
	by := map[string]*clusterRow{}
	row := func(id string) *clusterRow {
		if by[id] == nil {
			by[id] = &clusterRow{Cluster: id, DrainedOn: []string{}}
		}
		return by[id]
	}
	if report.Member != nil {
		row(report.Member.ClusterID).State = "this one"
	}
	for _, m := range report.Controller.Members {
		r := row(m.ID)
		r.State, r.Held = string(m.State), m.Held
		if !m.Since.IsZero() {
			r.Since = since(m.Since)
		}
	}
	for i := range imports {
		for _, cl := range imports[i].Status.Clusters {
			row(cl.Cluster).Services++
		}
		for id, n := range tally(endpoints[client.ObjectKeyFromObject(&imports[i])]) {
			r := row(id)
			r.Ready += n.ready
			r.All += n.all
		}
	}
	for _, n := range report.Agents.Nodes {
		if n.Status != nil {
			for _, id := range n.Status.Dataplane.Drained {
				r := row(id)
				r.DrainedOn = append(r.DrainedOn, n.Node)
			}
		}
	}
	rows := clusterRows{}
	for _, id := range slices.Sorted(maps.Keys(by)) {
		rows = append(rows, *by[id])
	}
	return rows, nil
}

type nodeRows []nodeReport

func (nodeRows) Header() []string {
	return []string{"NODE", "READY", "HOOKS", "FRONTENDS", "BACKENDS", "DIFFERENCES", "REFUSED", "DRAINED", "VERSION", "WAITING"}
}

func (n nodeRows) Rows() [][]string {
	var out [][]string
	for _, r := range n {
		if r.Status == nil {
			out = append(out, []string{r.Node, "no", "", "", "", "", "", "", "", r.Error})
			continue
		}
		d := r.Status.Dataplane
		attached := 0
		for _, h := range d.Hooks {
			if h.Attached {
				attached++
			}
		}
		var refused uint64
		for _, n := range d.Refusals {
			refused += n
		}
		out = append(out, []string{
			r.Node, map[bool]string{true: "yes", false: "no"}[r.Status.Ready], fmt.Sprintf("%d/%d", attached, len(d.Hooks)),
			strconv.Itoa(d.Frontends), strconv.Itoa(d.Backends), strconv.Itoa(d.Differences), strconv.FormatUint(refused, 10),
			strings.Join(d.Drained, ","), r.Status.Version, strings.Join(r.Status.Waiting, "; "),
		})
	}
	return out
}

func (nodeRows) Nothing() string { return "no agent runs; see isthmusctl status" }

func (c *collector) showNodes(ctx context.Context) (tables.Table, error) {
	r := &report{Namespace: c.namespace}
	if err := c.agents(ctx, r); err != nil {
		return nil, err
	}
	return append(nodeRows{}, r.Agents.Nodes...), nil
}
