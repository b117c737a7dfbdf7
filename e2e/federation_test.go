package e2e

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"

	"github.com/isthmus-net/isthmus/tools/conformance"
	"github.com/isthmus-net/isthmus/tools/lab/topology"
	"github.com/isthmus-net/isthmus/tools/process"
	"github.com/isthmus-net/isthmus/tools/testbed"
)

//go:embed testdata/federation.yaml
var memberServices string

//go:embed testdata/policy.yaml
var memberPolicy string

//go:embed testdata/machine.yaml
var memberMachine string

// federated are the federated Services of the tests: for each, its namespace and who answers.
var federated = map[string]struct {
	namespace string
	by        []string
}{
	"pods":     {testbed.Namespace, everywhere},
	"external": {namespace, everywhere},
	"nodes":    {namespace, everywhere},
	"balancer": {namespace, everywhere},
	"machine":  {namespace, []string{"machine"}},
}

// everywhere are the clusters of the federation.
var everywhere = append(testbed.Members(), testbed.Guest)

// TestFederation: a and b are supervisors, c is a child that reaches no other cluster. Federated Services of every kind are
// answered from all clusters, at ClusterIPs and by names of ClusterSetIPs. A federated policy is in all of them. A leader
// that is killed is followed by another one, which writes nothing. When the clusters leave, nothing of the federation is left in them.
func TestFederation(t *testing.T) {
	needBed(t)
	t.Parallel()
	federate(t)
	hermit(t)
	var offering errgroup.Group
	for _, m := range everywhere {
		offering.Go(func() error { return offerServices(t, m) })
	}
	offering.Go(func() error { return bed.Install(t.Context(), testbed.Guest) })
	if err := offering.Wait(); err != nil {
		t.Fatal(err)
	}
	reachesNobody(t)
	for _, m := range testbed.Members() {
		t.Logf("seen from %s:\n%s", m, led(t, m, noEpoch))
	}
	for _, m := range everywhere {
		t.Run("from "+m, func(t *testing.T) { reachesFederated(t, m) })
	}
	outside := outsideMachine(t)
	if outside != nil {
		t.Run("from a machine", func(t *testing.T) { machinesReach(t, outside) })
		conformance.Holds(t, "F13")
	} else {
		conformance.LeaveOut(t, "F13")
	}
	t.Run("policies hold", func(t *testing.T) {
		if !kubeRouter(t) {
			conformance.LeaveOut(t, "F28")
			return
		}
		policiesHold(t)
		conformance.Holds(t, "F28")
	})
	take := policyTravels(t)
	t.Run("a leader dies", leaderDies)
	take()
	t.Run("near servers", nearServers)
	t.Run("a child dies", func(t *testing.T) { childDies(t, outside) })
	conformance.Holds(t, "F1", "F4", "F5", "F12", "F14", "F15", "F18", "F24")
}

// deleteAll deletes the objects of a manifest that are there.
func deleteAll(ctx context.Context, member, manifest string) error {
	cmd := bed.Lab.Kubectl(ctx, member, "delete", "--ignore-not-found", "-f", "-")
	cmd.Stdin = strings.NewReader(manifest)
	_, err := process.Output(cmd)
	return err
}

// nearServers: the member Service in a asks for near endpoints. kube-proxy in a then leads to those of a alone.
func nearServers(t *testing.T) {
	target := "http://" + federatedIP(t, "a", testbed.Namespace, "pods")
	for _, step := range []struct {
		distribution string
		by           []string
	}{{`"PreferClose"`, []string{"a"}}, {"null", everywhere}} {
		patch := `{"spec":{"trafficDistribution":` + step.distribution + `}}`
		if _, err := bed.Kubectl(t.Context(), "a", "patch", "service", "pods-of-a", "--namespace", namespace, "--type", "merge", "--patch", patch); err != nil {
			t.Fatal(err)
		}
		if err := answeredBy(t.Context(), clientIn("a"), "--url", target, step.by...); err != nil {
			t.Errorf("trafficDistribution %s: %v", step.distribution, err)
		}
	}
}

// childDies: nothing of the guest answers any more, neither its API server nor its servers. kube-proxy in a then leads to the others alone, and
// so do host names for the machine outside, if there is one, until the guest is back.
func childDies(t *testing.T, outside client) {
	t.Helper()
	ctx := context.WithoutCancel(t.Context())
	target := "http://" + federatedIP(t, "a", testbed.Namespace, "pods")
	<-time.After(15 * time.Second) // until leaders have tried the guest's servers
	guest := clusterOf(t, testbed.Guest)
	machines := []string{guest.Name}
	for _, n := range guest.Nodes {
		machines = append(machines, n.Name)
	}
	revive := func() (errs error) {
		for _, at := range machines {
			_, err := bed.Node(ctx, at, "nft", "delete", "table", "inet", "dead")
			errs = errors.Join(errs, err)
		}
		return errs
	}
	for _, at := range machines {
		cmd := bed.Lab.NodeCommand(ctx, at, "nft", "-f", "-")
		cmd.Stdin = strings.NewReader("table inet dead {\n chain in { type filter hook prerouting priority -300; iifname eth0 drop; }\n}\n")
		if _, err := process.Output(cmd); err != nil {
			t.Fatal(errors.Join(err, revive()))
		}
	}
	began := time.Now()
	err := testbed.Eventually(ctx, patience, func(ctx context.Context) error { // clients that wait in vain would take longer to find out
		have, err := bed.Kubectl(ctx, "a", "get", "endpointslices", "--namespace", testbed.Namespace, "--output", "name",
			"--selector", "kubernetes.io/service-name=pods,cluster.federated.antreaplus.vmware-tanzu.com="+testbed.Guest)
		if err == nil && have != "" {
			err = fmt.Errorf("a has %s", have)
		}
		return err
	})
	took := time.Since(began)
	if err == nil {
		err = answeredBy(ctx, clientIn("a"), "--url", target, testbed.Members()...)
	}
	if err != nil {
		logEvidence(ctx, t)
	} else if outside != nil {
		err = forgetsDead(ctx, outside)
	}
	if err := errors.Join(err, revive()); err != nil {
		t.Fatal(err)
	}
	revived := time.Now()
	t.Logf("a leads to %v alone after %s", testbed.Members(), took.Round(time.Second/10))
	if err := answeredBy(ctx, clientIn("a"), "--url", target, everywhere...); err != nil {
		t.Error(err)
	}
	if err := readyAgain(ctx, guest, revived); err != nil {
		t.Error(err)
	}
}

// readyAgain waits until the nodes of a cluster are ready and its API server has heard from them since a time: a node that was cut off for
// a while may be ready still, and not any more a moment later.
func readyAgain(ctx context.Context, c topology.Cluster, since time.Time) error {
	for _, n := range c.Nodes {
		if err := testbed.Eventually(ctx, patience, func(ctx context.Context) error {
			var lease coordinationv1.Lease
			err := bed.Get(ctx, c.Name, "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/"+n.Name, &lease)
			if err == nil && !lease.Spec.RenewTime.After(since) {
				err = fmt.Errorf("node %s renewed its Lease at %s and was cut off until %s", n.Name, lease.Spec.RenewTime, since)
			}
			return err
		}); err != nil {
			return err
		}
	}
	_, err := bed.Kubectl(ctx, c.Name, "wait", "nodes", "--all", "--for", "condition=Ready", "--timeout", patience.String())
	return err
}

// logEvidence logs what leaders and nodes know of dead clusters.
func logEvidence(ctx context.Context, t *testing.T) {
	t.Helper()
	for _, m := range testbed.Members() {
		for _, ask := range [][]string{
			{"logs", "--selector", "app.kubernetes.io/name=isthmus-controller", "--prefix", "--since", "4m", "--tail", "-1"},
			{"get", "nodereports.isthmus.dev", "--output", "custom-columns=NODE:.metadata.name,ANSWERING:.spec.answering,SILENT:.spec.silent"},
			{"get", "leases", "--output", "custom-columns=NAME:.metadata.name,HOLDER:.spec.holderIdentity,RENEWED:.spec.renewTime"},
		} {
			said, err := bed.Kubectl(ctx, m, append(ask, "--namespace", testbed.Namespace)...)
			t.Logf("%s: kubectl %s: %v\n%s", m, strings.Join(ask, " "), err, said)
		}
	}
}

// policyTravels federates a policy of the guest, and waits until all clusters have it. The returned function removes it, and
// waits until it is gone everywhere.
func policyTravels(t *testing.T) (take func()) {
	t.Helper()
	await := func(there bool) {
		t.Helper()
		if err := testbed.Eventually(t.Context(), patience, func(ctx context.Context) error {
			all, err := written(ctx)
			for _, m := range testbed.Members() {
				if is := all[m+"/NetworkPolicy/"+namespace+"/travelling"] != ""; is != there {
					err = errors.Join(err, fmt.Errorf("that %s has a copy of the policy is %t, want %t", m, is, there))
				}
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
	if err := bed.Apply(t.Context(), testbed.Guest, memberPolicy); err != nil {
		t.Fatal(err)
	}
	remove := func(ctx context.Context) error {
		_, err := bed.Kubectl(ctx, testbed.Guest, "delete", "--ignore-not-found", "networkpolicy", "travelling", "--namespace", namespace)
		return err
	}
	t.Cleanup(func() {
		if err := remove(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	await(true)
	return func() {
		t.Helper()
		if err := remove(t.Context()); err != nil {
			t.Fatal(err)
		}
		await(false)
	}
}

// hermit makes the guest one that reaches no API server of the others, neither from its nodes nor from its pods.
func hermit(t *testing.T) {
	t.Helper()
	ctx := context.WithoutCancel(t.Context())
	guest := clusterOf(t, testbed.Guest)
	for _, at := range []string{guest.Name, guest.Nodes[0].Name} {
		rules := "add table ip hermit\n"
		for _, hook := range []string{"output", "forward"} {
			rules += fmt.Sprintf("add chain ip hermit %[1]s { type filter hook %[1]s priority 0; }\n"+
				"add rule ip hermit %[1]s ip daddr { %[2]s } tcp dport 6443 reject\n", hook, strings.Join(servers(t), ", "))
		}
		cmd := bed.Lab.NodeCommand(ctx, at, "nft", "-f", "-")
		cmd.Stdin = strings.NewReader(rules)
		if _, err := process.Output(cmd); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if _, err := bed.Node(ctx, at, "nft", "delete", "table", "ip", "hermit"); err != nil {
				t.Error(err)
			}
		})
	}
}

// reachesNobody checks that the guest is a hermit.
func reachesNobody(t *testing.T) {
	t.Helper()
	for _, server := range servers(t) {
		knock := []string{"curl", "-sk", "--max-time", "5", "https://" + server + ":6443/livez"}
		said, nodeErr := bed.Node(t.Context(), clusterOf(t, testbed.Guest).Nodes[0].Name, knock...)
		heard, podErr := bed.Exec(t.Context(), testbed.Guest, namespace, "client", knock...)
		if nodeErr == nil || podErr == nil {
			t.Errorf("%s reaches the API server at %s, which says %q to a node and %q to a pod", testbed.Guest, server, said, heard)
		}
	}
}

// servers are the addresses of the supervisors' API servers.
func servers(t *testing.T) []string {
	t.Helper()
	var all []string
	for _, m := range testbed.Members() {
		all = append(all, clusterOf(t, m).Machine().IPv4.String())
	}
	return all
}

// clusterOf is a cluster as the lab has it.
func clusterOf(t *testing.T, name string) topology.Cluster {
	t.Helper()
	c, ok := bed.Lab.Topology().Cluster(name)
	if !ok {
		t.Fatalf("the lab has no cluster %s", name)
	}
	return c
}

// offerServices gives a cluster its servers and member Services. Its first node has an address for external IPs and one
// that is the cluster's load balancer, as announcers of addresses do it. The machine is a's.
func offerServices(t *testing.T, member string) error {
	t.Helper()
	ctx := context.WithoutCancel(t.Context())
	node := clusterOf(t, member).Nodes[0]
	external, balancer := addressOf(node, 100), addressOf(node, 200) // 10.200.0.11 has 10.200.0.111 and 10.200.0.211
	for _, address := range []string{external, balancer} {
		if _, err := bed.Node(ctx, node.Name, "ip", "address", "replace", address+"/32", "dev", "eth0"); err != nil {
			return err
		}
		t.Cleanup(func() {
			if _, err := bed.Node(ctx, node.Name, "ip", "address", "del", address+"/32", "dev", "eth0"); err != nil {
				t.Error(err)
			}
		})
	}
	if err := startWorkload(ctx, member); err != nil {
		return err
	}
	manifest := memberServices
	if member == "a" {
		address, err := machine(t)
		if err != nil {
			return err
		}
		manifest += "---\n" + strings.ReplaceAll(memberMachine, "MACHINE_IP", address)
	}
	manifest = strings.NewReplacer("CLUSTER_ID", member, "EXTERNAL_IP", external).Replace(manifest)
	t.Cleanup(func() {
		if err := deleteAll(ctx, member, manifest); err != nil {
			t.Error(err)
		}
	})
	if err := bed.Apply(ctx, member, manifest); err != nil {
		return err
	}
	balanced := fmt.Sprintf(`{"status":{"loadBalancer":{"ingress":[{"ip":%q}]}}}`, balancer)
	_, err := bed.Kubectl(ctx, member, "patch", "service", "balancer-of-"+member, "--namespace", namespace, "--subresource", "status", "--type", "merge", "--patch", balanced)
	return err
}

// addressOf returns the address that lies after an address of a node.
func addressOf(node topology.Node, after byte) string {
	at := node.IPv4.As4()
	return netip.AddrFrom4([4]byte{at[0], at[1], at[2], at[3] + after}).String()
}

// machine starts a server that is no pod, and returns its address. Its port is 8088.
func machine(t *testing.T) (string, error) {
	t.Helper()
	cmd := bed.Lab.FabricCommand(t.Context(), bed.Program("echo-server"), "serve", "--http", ":8088")
	cmd.Env = append(os.Environ(), "CLUSTER=machine", "POD=machine")
	if err := cmd.Start(); err != nil {
		return "", err
	}
	t.Cleanup(func() { _ = cmd.Wait() }) // killed, as its context is over
	return topology.FabricIPv4.Addr().String(), nil
}

// federate makes the clusters a federation with ClusterSetIPs, as administrators do it. When the test ends they leave it,
// and nothing of it is left.
func federate(t *testing.T) {
	t.Helper()
	ctx := context.WithoutCancel(t.Context())
	all := []string{"--supervisor", "a=a", "--supervisor", "b=b", "--child", testbed.Guest + "=" + testbed.Guest}
	run := func(args ...string) error {
		out, err := bed.Federate(ctx, args...)
		t.Logf("isthmusctl federation %s\n%s", strings.Join(args, " "), strings.TrimSpace(out))
		return err
	}
	t.Cleanup(func() {
		err := errors.Join( // the last supervisor leaves last
			run(append([]string{"remove", testbed.Guest}, all...)...),
			run(append([]string{"remove", "b"}, all[:4]...)...),
			run(append([]string{"remove", "a"}, all[:2]...)...),
		)
		left, err2 := written(ctx)
		if err := errors.Join(err, err2, bed.Uninstall(ctx, testbed.Guest)); err != nil || len(left) > 0 {
			t.Errorf("the federation left %v: %v", left, err)
		}
	})
	create := []string{"create", "--clusterset", "clusterset", "--open-grants"}
	for _, m := range append(testbed.Members(), testbed.Guest) {
		create = append(create, "--external-cidr", m+"="+addressOf(clusterOf(t, m).Nodes[0], 100)+"/32")
	}
	if err := run(append(create, all...)...); err != nil {
		t.Fatal(err)
	}
	for _, supervisor := range testbed.Members() {
		if err := patchHostnames(ctx, supervisor); err != nil {
			t.Fatal(err)
		}
	}
	for _, m := range append(testbed.Members(), testbed.Guest) { // nodes of the guest serve no address outside of its ranges either
		const vips = `{"spec":{"clusterSetIP":{"enabled":true,"ranges":["242.0.0.0/16"]}}}`
		if _, err := bed.Kubectl(ctx, m, "patch", "federation", "federation", "--type", "merge", "--patch", vips); err != nil {
			t.Fatal(err)
		}
	}
}

// noEpoch is before the first one.
const noEpoch = -1

// led waits until a supervisor says that all members are reached and led, the guest in an epoch after the given one,
// and returns what it says.
func led(t *testing.T, supervisor string, after int64) string {
	t.Helper()
	var table string
	if err := testbed.Eventually(t.Context(), patience, func(ctx context.Context) error {
		said, err := bed.Federate(ctx, "status", "--context", supervisor, "--output", "json")
		if err != nil {
			return err
		}
		var members []struct {
			ClusterID string
			Epoch     int64
		}
		if err := json.Unmarshal([]byte(said), &members); err != nil {
			return fmt.Errorf("read the federation's status %q: %w", said, err)
		}
		for _, m := range members {
			if m.ClusterID == testbed.Guest && m.Epoch <= after {
				return fmt.Errorf("%s thinks that %s is led in epoch %d still", supervisor, testbed.Guest, m.Epoch)
			}
		}
		table, err = bed.Federate(ctx, "status", "--context", supervisor)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return table
}

// reachesFederated asks every federated Service from a pod of a cluster, at its ClusterIP and by the name of its
// ClusterSetIP.
func reachesFederated(t *testing.T, from string) {
	t.Helper()
	group, ctx := errgroup.WithContext(t.Context())
	for service, is := range federated {
		group.Go(func() error {
			var svc corev1.Service
			if err := testbed.Eventually(ctx, patience, func(ctx context.Context) error {
				return bed.Get(ctx, from, "/api/v1/namespaces/"+is.namespace+"/services/"+service, &svc)
			}); err != nil {
				return err
			}
			for _, host := range []string{svc.Spec.ClusterIP, service + "." + is.namespace + ".svc.clusterset.local"} {
				if err := answeredBy(ctx, clientIn(from), "--url", "http://"+host, is.by...); err != nil {
					return fmt.Errorf("federated Service %s: %w", service, err)
				}
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		t.Error(err)
	}
}

// leaderDies kills the process that leads the guest. Another one leads when the Lease is over, and not one object is written
// because of it.
func leaderDies(t *testing.T) {
	ctx := t.Context()
	before, err := written(ctx)
	if err != nil || len(before) == 0 {
		t.Fatalf("leaders wrote %v: %v", before, err)
	}
	held, err := lease(ctx)
	if err != nil {
		t.Fatal(err)
	}
	holder, epoch := *held.HolderIdentity, *held.LeaseTransitions
	leader, _, _ := strings.Cut(holder, "_") // SUPERVISOR/POD_UNIQUE
	supervisor, pod, _ := strings.Cut(leader, "/")
	if err := bed.Kill(ctx, supervisor, testbed.Namespace, pod); err != nil {
		t.Fatal(err)
	}
	var next coordinationv1.LeaseSpec
	if err := testbed.Eventually(ctx, patience, func(ctx context.Context) error {
		var err error
		next, err = lease(ctx)
		if err == nil && *next.HolderIdentity == holder {
			held, err = next, errors.New("the dead leader has the Lease still")
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if *next.LeaseTransitions != epoch+1 {
		t.Errorf("epoch %d comes after %d", *next.LeaseTransitions, epoch)
	}
	// By the clocks of those who wrote the Lease, which are one: when it was renewed last, and when it was taken. A candidate
	// looks at it every two seconds to five, and once it has seen that it was renewed last, waits until it is over.
	duration, after := time.Duration(*held.LeaseDurationSeconds)*time.Second, next.AcquireTime.Sub(held.RenewTime.Time)
	t.Logf("%s leads %s after %s, %s after its Lease of %s was renewed last", *next.HolderIdentity, testbed.Guest, holder, after.Round(time.Second/10), duration)
	if after < duration || after > 2*duration {
		t.Errorf("the Lease of %s was taken %s after it was renewed last", duration, after)
	}
	for _, m := range testbed.Members() {
		t.Logf("seen from %s:\n%s", m, led(t, m, int64(epoch)))
	}
	if after, err := written(ctx); err != nil || !maps.Equal(before, after) {
		t.Errorf("a change of the leader wrote: before %v, after %v: %v", before, after, err)
	}
}

// lease returns who leads the guest, as its API server has it, since when, and in which epoch.
func lease(ctx context.Context) (coordinationv1.LeaseSpec, error) {
	var l coordinationv1.Lease
	if err := bed.Get(ctx, testbed.Guest, "/apis/coordination.k8s.io/v1/namespaces/"+testbed.Namespace+"/leases/"+testbed.Guest, &l); err != nil {
		return l.Spec, err
	}
	if s := l.Spec; s.HolderIdentity == nil || s.LeaseTransitions == nil || s.RenewTime == nil || s.AcquireTime == nil || s.LeaseDurationSeconds == nil {
		return s, errors.New("no process holds the Lease of " + testbed.Guest)
	}
	return l.Spec, nil
}

// written returns the versions of all that leaders wrote, by cluster, kind and name.
func written(ctx context.Context) (map[string]string, error) {
	all := map[string]string{}
	labels := map[string]string{"services,serviceimports,networkpolicies": "app.kubernetes.io/managed-by", "endpointslices": "endpointslice.kubernetes.io/managed-by"}
	for _, m := range everywhere {
		for kinds, label := range labels {
			out, err := bed.Kubectl(ctx, m, "get", kinds, "--all-namespaces", "--selector", label+"=federation.isthmus.dev",
				"--output", `jsonpath={range .items[*]}{.kind}/{.metadata.namespace}/{.metadata.name} {.metadata.resourceVersion}{"\n"}{end}`)
			if err != nil {
				return nil, err
			}
			for line := range strings.Lines(out) {
				name, version, _ := strings.Cut(strings.TrimSpace(line), " ")
				all[m+"/"+name] = version
			}
		}
	}
	return all, nil
}
