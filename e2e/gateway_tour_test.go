package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gophercloud/gophercloud/v2/openstack/networking/v2/extensions/quotas"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/service"
	"github.com/isthmus-net/isthmus/tools/gateways"
	"github.com/isthmus-net/isthmus/tools/netlab"
	"github.com/isthmus-net/isthmus/tools/neutron"
	"github.com/isthmus-net/isthmus/tools/testbed"
)

// inside is a Service at an address of the gateways' own network, which routers learn by BGP. Fill it in by serveInside.
const inside = `
apiVersion: v1
kind: Service
metadata:
  name: NAME
  namespace: e2e
  annotations: {ANNOTATIONS}
spec:
  type: LoadBalancer
  loadBalancerClass: isthmus.dev/gateway
  selector: {app: NAME}
  ports: [{name: http, port: 80, targetPort: 8080}]
`

// keystoneAway is how long Keystone is down.
const keystoneAway = 10 * time.Minute

// operatorsTour meets on a real Neutron what operators of gateways meet, while a client asks a Service all the time: a full quota, tokens
// that end, a Keystone that is down, and a gateway that is cut off from the controller while its address is freed and asked for again.
func operatorsTour(t *testing.T, e *gateways.Edge, dir string) {
	t.Helper()
	ctx := t.Context()
	g, err := gateways.Install(ctx, e, bed.Lab, "a", dir, desired.EBPF)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("controller:\n%s\ngateways:\n%s\n%s", g.Controller.Log(), g.Agents[0].Log(), g.Agents[1].Log())
		}
		if err := g.Close(); err != nil {
			t.Error(err)
		}
	})
	serve(t, "outside", outside)
	asking := ask(t, g, floatingIP(t, "outside"))
	reached(t, g, asking.address)
	began := time.Now()

	quotaFull(t, g)
	keystoneDown(t, g, asking)
	if failed := asking.failedSince(began); len(failed) > 0 {
		t.Errorf("of the client's requests %d failed: %v", len(failed), failed[0])
	}
	asking.stop()
	addressMoves(t, g)
	has(t, g, "with two Services", gateways.Objects{Ports: 2, FloatingIPs: 1})
}

// serve creates servers, and a Service of them for clients outside, until the test ends. edits change the servers' manifest: an old
// text and the new one, as for strings.NewReplacer.
func serve(t *testing.T, name, manifest string, edits ...string) {
	t.Helper()
	t.Cleanup(func() {
		if err := removeServed(context.WithoutCancel(t.Context()), name); err != nil {
			t.Error(err)
		}
	})
	edits = append([]string{"NAME", name, "CLUSTER_ID", "a", "PRE_STOP", "0"}, edits...)
	servers := strings.NewReplacer(edits...).Replace(dataplaneWorkload)
	for _, m := range []string{servers, manifest} { // the second is another Service of the servers
		if err := bed.Apply(t.Context(), "a", m); err != nil {
			t.Fatal(err)
		}
	}
}

// removeServed removes what serve has created, and returns when it is gone.
func removeServed(ctx context.Context, name string) error {
	_, err := bed.Kubectl(ctx, "a", "delete", "service/"+name, "deployment/"+name, "--namespace", namespace, "--ignore-not-found", "--timeout", patience.String())
	return err
}

// serveInside does the same with a Service of inside.
func serveInside(t *testing.T, name, annotations string) {
	t.Helper()
	serve(t, name, strings.NewReplacer("NAME", name, "ANNOTATIONS", annotations).Replace(inside))
}

// answer is what a request of a client got.
type answer struct {
	at  time.Time // when it ended
	pod string
	err error
}

// asking is a client that asks an address again and again.
type asking struct {
	address netip.Addr
	stop    func()

	mu  sync.Mutex
	all []answer
}

// ask asks until stop is called or the test ends. Each request is a connection of its own.
func ask(t *testing.T, g *gateways.Installation, address netip.Addr) *asking {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	a := &asking{address: address}
	ended := make(chan struct{})
	a.stop = sync.OnceFunc(func() {
		cancel()
		<-ended
	})
	t.Cleanup(a.stop)
	through := &http.Client{Timeout: 2 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, to string) (c net.Conn, err error) {
			err = g.Client.Do(func() error {
				c, err = (&net.Dialer{}).DialContext(ctx, network, to)
				return err
			})
			return c, err
		},
	}}
	go func() {
		defer close(ended)
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for ; ctx.Err() == nil; <-tick.C {
			pod, err := podAt(ctx, through, address)
			if ctx.Err() != nil {
				return
			}
			a.mu.Lock()
			a.all = append(a.all, answer{time.Now(), pod, err})
			a.mu.Unlock()
		}
	}()
	return a
}

// podAt returns the pod that answers at an address.
func podAt(ctx context.Context, through *http.Client, address netip.Addr) (string, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address.String(), http.NoBody)
	if err != nil {
		return "", err
	}
	response, err := through.Do(r)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	for field := range strings.FieldsSeq(string(body)) {
		if pod, ok := strings.CutPrefix(field, "pod="); ok {
			return pod, err
		}
	}
	return "", fmt.Errorf("%s: %q: %w", response.Status, body, err)
}

func (a *asking) since(then time.Time) []answer {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(a.all), func(r answer) bool { return r.at.Before(then) })
}

func (a *asking) failedSince(then time.Time) []answer {
	return slices.DeleteFunc(a.since(then), func(r answer) bool { return r.err == nil })
}

// awaitPods waits until all pods of a Deployment answer.
func (a *asking) awaitPods(t *testing.T, name string, replicas int) {
	t.Helper()
	for _, args := range [][]string{{"scale", "deployment/" + name, "--replicas", fmt.Sprint(replicas)}, {"rollout", "status", "deployment/" + name, "--timeout", patience.String()}} {
		if _, err := bed.Kubectl(t.Context(), "a", append(args, "--namespace", namespace)...); err != nil {
			t.Fatal(err)
		}
	}
	began := time.Now()
	said, err := bed.Kubectl(t.Context(), "a", "get", "pods", "--namespace", namespace, "--selector", "app="+name, "--output", "jsonpath={.items[*].metadata.name}")
	if err != nil {
		t.Fatal(err)
	}
	if err := testbed.Eventually(t.Context(), patience, func(context.Context) error {
		heard := a.since(began)
		for pod := range strings.FieldsSeq(said) {
			if !slices.ContainsFunc(heard, func(r answer) bool { return r.pod == pod }) {
				failed := a.failedSince(began)
				return fmt.Errorf("pod %s does not answer; of %d requests %d failed, last %v", pod, len(heard), len(failed), failed[max(0, len(failed)-1):])
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

// awaitCondition waits until a condition of a Service has a reason.
func awaitCondition(t *testing.T, name, kind, reason string) {
	t.Helper()
	if err := testbed.Eventually(t.Context(), patience, func(ctx context.Context) error {
		said, err := bed.Kubectl(ctx, "a", "get", "service", name, "--namespace", namespace, "--output", fmt.Sprintf("jsonpath={.status.conditions[?(@.type==%q)]['reason','message']}", kind))
		if err == nil && !strings.HasPrefix(said, reason+" ") {
			err = fmt.Errorf("condition %s of Service %s: %q, want the reason %s", kind, name, said, reason)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
}

// quotaFull creates a Service while the quota of ports is full, and then makes room for it.
func quotaFull(t *testing.T, g *gateways.Installation) {
	t.Helper()
	ctx := t.Context()
	admin, err := g.Cloud.Networking(ctx)
	if err != nil {
		t.Fatal(err)
	}
	is, err := quotas.GetDetail(ctx, admin, g.IDs.Project).Extract()
	if err != nil {
		t.Fatal(err)
	}
	limit := func(ports int) {
		t.Helper()
		if _, err := quotas.Update(context.WithoutCancel(ctx), admin, g.IDs.Project, quotas.UpdateOpts{Port: &ports}).Extract(); err != nil {
			t.Fatal(err)
		}
	}
	defer func() { limit(is.Port.Limit) }()
	limit(is.Port.Used)
	serveInside(t, "crowded", "")
	awaitCondition(t, "crowded", service.ConditionMapped, service.ReasonQuotaExceeded)
	limit(is.Port.Used + 1)
	awaitCondition(t, "crowded", service.ConditionMapped, service.ReasonMapped)
	if err := dismiss(ctx, "crowded"); err != nil {
		t.Fatal(err)
	}
}

// keystoneDown lets the controller's token end while Keystone is there, and while it is down. A new Service waits for Keystone, and the
// endpoints of another one do not.
func keystoneDown(t *testing.T, g *gateways.Installation, client *asking) {
	t.Helper()
	ctx := t.Context()
	// Neutron takes tokens that end within 30 s for ended, and would ask Keystone for another one at each request.
	const life = time.Minute
	restart := func(cloud *neutron.Cloud) {
		t.Helper()
		if err := cloud.Start(context.WithoutCancel(ctx), neutron.Keystone); err != nil {
			t.Fatal(err)
		}
	}
	kill := func() {
		t.Helper()
		if err := g.Cloud.Kill(context.WithoutCancel(ctx), neutron.Keystone); err != nil {
			t.Fatal(err)
		}
	}
	kill()
	restart(g.Cloud.WithTokens(life))
	t.Cleanup(func() {
		kill()
		restart(g.Cloud)
	})
	if err := errors.Join(g.Controller.Stop(), g.StartController(ctx)); err != nil { // its token is one of those
		t.Fatal(err)
	}
	serveInside(t, "before", "")
	awaitCondition(t, "before", service.ConditionMapped, service.ReasonMapped)
	<-time.After(life + time.Second)
	serveInside(t, "renewed", "")
	awaitCondition(t, "renewed", service.ConditionMapped, service.ReasonMapped)

	kill()
	down := time.Now()
	<-time.After(life + time.Second)
	serveInside(t, "waiting", "")
	client.awaitPods(t, "outside", 3)
	<-time.After(time.Until(down.Add(keystoneAway)))
	client.awaitPods(t, "outside", 4)
	if said, err := says(ctx, "waiting"); err != nil || said != "" {
		t.Errorf("without Keystone, the new Service has the address %q, %v", said, err)
	}
	restart(g.Cloud.WithTokens(life))
	awaitCondition(t, "waiting", service.ConditionMapped, service.ReasonMapped)
	for _, name := range []string{"before", "renewed", "waiting"} {
		if err := dismiss(ctx, name); err != nil {
			t.Fatal(err)
		}
	}
}

// addressMoves frees the address of a Service while the gateway that serves it does not hear of that, and gives it to another one. At no
// instant do both serve it.
func addressMoves(t *testing.T, g *gateways.Installation) {
	t.Helper()
	ctx := t.Context()
	serveInside(t, "former", "")
	awaitCondition(t, "former", service.ConditionMapped, service.ReasonMapped)
	var address netip.Addr
	if err := testbed.Eventually(ctx, patience, func(ctx context.Context) error {
		said, err := says(ctx, "former")
		if err == nil {
			address, err = netip.ParseAddr(said)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	reached(t, g, address)
	client := ask(t, g, address)
	reconnect := cutOff(t, g.Gateways[0])
	if err := dismiss(ctx, "former"); err != nil {
		t.Fatal(err)
	}
	serveInside(t, "rival", service.AnnotationAddresses+": "+address.String())
	awaitCondition(t, "rival", service.ConditionMapped, service.ReasonMapped)
	asked := time.Now()
	<-time.After(5 * time.Second)
	t.Logf("while the gateway is cut off: %d answers, %d of them failures", len(client.since(asked)), len(client.failedSince(asked)))
	reconnect()
	if err := testbed.Eventually(ctx, patience, func(context.Context) error {
		if heard := client.since(asked); len(heard) == 0 || !strings.HasPrefix(heard[len(heard)-1].pod, "rival-") {
			return fmt.Errorf("the rival does not answer: %v", heard[max(0, len(heard)-1):])
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	moved := false
	for _, r := range client.since(time.Time{}) {
		moved = moved || strings.HasPrefix(r.pod, "rival-")
		if moved && strings.HasPrefix(r.pod, "former-") {
			t.Fatalf("%s answers after the rival has", r.pod)
		}
	}
	client.stop()
}

// cutOff keeps a gateway's agent from hearing of anybody, and its router and clients from nothing, until the returned function is called.
func cutOff(t *testing.T, gateway *netlab.Namespace) (reconnect func()) {
	t.Helper()
	nft := func(args ...string) {
		t.Helper()
		if err := gateway.Do(func() error {
			if said, err := exec.Command("nft", args...).CombinedOutput(); err != nil {
				return fmt.Errorf("nft: %w: %s", err, said)
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	nft("add table inet cut-off; add chain inet cut-off in { type filter hook input priority -300; }; add rule inet cut-off in tcp dport 9479 drop")
	reconnect = sync.OnceFunc(func() { nft("delete table inet cut-off") })
	t.Cleanup(reconnect)
	return reconnect
}
