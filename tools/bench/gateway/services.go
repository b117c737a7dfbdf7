package gateway

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/service"
	"github.com/isthmus-net/isthmus/tools/bench/metric"
	"github.com/isthmus-net/isthmus/tools/gateways"
	"github.com/isthmus-net/isthmus/tools/lab/cluster"
)

//go:embed service.yaml
var serviceServers string

const (
	serviceNamespace = "bench"
	// serviceCount is the number of Services created per round, one after another.
	serviceCount = 5
	// attempt is how long the client waits for an answer before it retries.
	attempt = 250 * time.Millisecond
)

// services measures how long a client waits for a new Service. The cluster is a lab, Keystone and Neutron are real, and
// the lab's router applies the NAT of the L3 agent, for which it polls Neutron every 250 ms.
func services(ctx context.Context, rounds int, progress io.Writer) (_ []metric.Metric, err error) {
	lab, err := cluster.Open(cluster.Config{Name: "bench-gateway", Topology: "a:1", Progress: progress})
	if err != nil {
		return nil, err
	}
	undo := []func() error{func() error { return lab.Down(context.WithoutCancel(ctx)) }}
	defer func() {
		for _, u := range slices.Backward(undo) {
			err = errors.Join(err, u())
		}
	}()
	if err := lab.Up(ctx); err != nil {
		return nil, err
	}
	dir := filepath.Join(lab.Dir(), "edge")
	edge, err := gateways.Up(ctx, gateways.Config{Lab: lab, Dir: dir, Progress: progress})
	if err != nil {
		return nil, err
	}
	undo = append(undo, func() error { return edge.Close(context.WithoutCancel(ctx)) })
	i, err := gateways.Install(ctx, edge, lab, "a", dir, desired.EBPF)
	if err != nil {
		return nil, err
	}
	undo = append(undo, i.Close)
	if err := i.Apply(ctx, serviceServers); err != nil {
		return nil, err
	}
	if _, err := i.Kubectl(ctx, "rollout", "status", "deployment/web", "--namespace", serviceNamespace, "--timeout", "60s"); err != nil {
		return nil, err
	}
	config, err := lab.RESTConfig("a")
	if err != nil {
		return nil, err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	var took []time.Duration
	for n := range rounds * serviceCount {
		d, err := firstAnswer(ctx, i, client, fmt.Sprintf("web-%d", n))
		if err != nil {
			return nil, err
		}
		fmt.Fprintf(progress, "Service %d/%d answers after %s\n", n+1, rounds*serviceCount, d.Round(time.Millisecond))
		took = append(took, d)
	}
	return serviceRows(took), nil
}

// firstAnswer creates a Service and returns the time until it answered the client at its floating IP. It deletes the
// Service again.
func firstAnswer(ctx context.Context, i *gateways.Installation, client kubernetes.Interface, name string) (took time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, 2*timeout)
	defer cancel()
	api := client.CoreV1().Services(serviceNamespace)
	begin := time.Now()
	_, err = api.Create(ctx, &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{service.AnnotationFloatingIP: "allocate"}},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, LoadBalancerClass: new(service.Class), Selector: map[string]string{"app": "web"},
			Ports: []corev1.ServicePort{{Port: served, TargetPort: intstr.FromString("http")}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return 0, err
	}
	at, err := addressOf(ctx, client, name)
	if err != nil {
		return 0, err
	}
	if err := await(ctx, func() (string, error) { return missing(get(ctx, i, at)), nil }); err != nil {
		return 0, fmt.Errorf("ask Service %s at %s: %w\n%s", name, at, err, i.Controller.Log())
	}
	took = time.Since(begin)
	if err := api.Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
		return 0, err
	}
	return took, await(ctx, func() (string, error) {
		_, err := api.Get(ctx, name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return "", nil
		}
		return fmt.Sprintf("Service %s does not go\n%s", name, i.Controller.Log()), err
	})
}

// addressOf waits for the floating IP of a Service.
func addressOf(ctx context.Context, client kubernetes.Interface, name string) (netip.Addr, error) {
	w, err := client.CoreV1().Services(serviceNamespace).Watch(ctx, metav1.SingleObject(metav1.ObjectMeta{Name: name}))
	if err != nil {
		return netip.Addr{}, err
	}
	defer w.Stop()
	for event := range w.ResultChan() {
		s, ok := event.Object.(*corev1.Service)
		if !ok {
			return netip.Addr{}, fmt.Errorf("watch Service %s: %w", name, apierrors.FromObject(event.Object))
		}
		for _, ingress := range s.Status.LoadBalancer.Ingress {
			if a, err := netip.ParseAddr(ingress.IP); err == nil && gateways.External[0].Contains(a) {
				return a, nil
			}
		}
	}
	return netip.Addr{}, fmt.Errorf("wait for a floating IP of Service %s: %w", name, ctx.Err())
}

// get sends one request to a server, from the client's network.
func get(ctx context.Context, i *gateways.Installation, at netip.Addr) error {
	ctx, cancel := context.WithTimeout(ctx, attempt)
	defer cancel()
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, network, addr string) (c net.Conn, err error) {
		err = i.Client.Do(func() error {
			c, err = new(net.Dialer).DialContext(ctx, network, addr)
			return err
		})
		return c, err
	}}}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+at.String(), nil)
	if err != nil {
		return err
	}
	response, err := client.Do(request)
	if err != nil {
		return err
	}
	return response.Body.Close()
}

// serviceRows returns the waiting times of clients.
func serviceRows(took []time.Duration) []metric.Metric {
	slices.Sort(took)
	at := func(share float64) float64 { return took[int(share*float64(len(took)-1))].Seconds() }
	return []metric.Metric{
		{
			Name: "Service creation until the client's first answer, with a floating IP from a real Neutron", Value: at(0.5), Unit: "s",
			Bar: new(5.0), Better: metric.Lower, Quartiles: &[2]float64{at(0.25), at(0.75)},
		},
		{Name: fmt.Sprintf("the same, longest of %d", len(took)), Value: at(1), Unit: "s", Better: metric.Lower},
	}
}
