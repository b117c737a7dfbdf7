package membership

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sync/errgroup"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/apitest"
)

var brokerServer, memberServer, otherServer apitest.Server

func TestMain(m *testing.M) {
	os.Exit(apitest.Run(m, &brokerServer, &memberServer, &otherServer))
}

func newClient(t testing.TB, cfg *rest.Config) client.Client {
	t.Helper()
	scheme, err := NewScheme()
	if err != nil {
		t.Fatal(err)
	}
	c, err := client.New(cfg, client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// deploy makes a broker in a namespace of the test's own and plays the controller that issues tokens
// into Secrets, which the test's API server lacks. The tokens are real.
func deploy(t *testing.T, b Broker) (BrokerInfo, client.Client) {
	t.Helper()
	cfg := brokerServer.Config(t)
	admin := newClient(t, cfg)
	b.Server, b.CA, b.TokenTTL = cfg.Host, cfg.CAData, time.Hour
	info, _, err := DeployBroker(t.Context(), admin, b)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var tokens errgroup.Group
	tokens.Go(func() error { return issueTokens(ctx, admin, b.Namespace) })
	t.Cleanup(func() {
		cancel()
		if err := tokens.Wait(); err != nil {
			t.Errorf("issue tokens: %v", err)
		}
	})
	return info, admin
}

func issueTokens(ctx context.Context, admin client.Client, namespace string) error {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		secrets := &corev1.SecretList{}
		if err := admin.List(ctx, secrets, client.InNamespace(namespace)); err != nil {
			continue // at the end of the test
		}
		for _, s := range secrets.Items {
			if s.Type != corev1.SecretTypeServiceAccountToken || len(s.Data) > 0 {
				continue
			}
			request := &authenticationv1.TokenRequest{}
			account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: s.Annotations[corev1.ServiceAccountNameKey]}}
			if err := admin.SubResource("token").Create(ctx, account, request); err != nil {
				return err
			}
			s.Data = map[string][]byte{corev1.ServiceAccountTokenKey: []byte(request.Status.Token)}
			if err := admin.Update(ctx, &s); client.IgnoreNotFound(err) != nil && !apierrors.IsConflict(err) {
				return err
			}
		}
	}
}

// request is a Request to join the broker of info, with addresses that meet nobody's: n tells members apart.
func request(info BrokerInfo, id clusterset.ClusterID, n int) Request {
	return Request{
		ClusterID: id, Broker: info, Namespace: fmt.Sprintf("%s-%s", info.Namespace, strings.ReplaceAll(string(id), ".", "-")),
		Addresses: Addresses{
			Pods:     cidrs(fmt.Sprintf("10.%d.0.0/16", n)),
			Nodes:    cidrs(fmt.Sprintf("192.0.2.%d/32", n)),
			Services: cidrs("10.96.0.0/12"),
		},
	}
}

func TestDeployBrokerTwiceKeepsSettings(t *testing.T) {
	info, admin := deploy(t, Broker{Namespace: "twice"})
	get := func() *v1alpha1.ClusterSetConfig {
		t.Helper()
		c := &v1alpha1.ClusterSetConfig{}
		if err := admin.Get(t.Context(), client.ObjectKey{Namespace: "twice", Name: v1alpha1.ClusterSetConfigName}, c); err != nil {
			t.Fatal(err)
		}
		return c
	}
	first := get()
	if first.Spec.ClusterSetID != "clusterset" || !first.Spec.ClusterSetIPEnabled || len(first.Spec.ClusterSetIPCIDRRange) != 2 {
		t.Errorf("defaults: %+v", first.Spec)
	}
	again, _ := deploy(t, Broker{Namespace: "twice"})
	if second := get(); second.ResourceVersion != first.ResourceVersion {
		t.Errorf("a second run wrote the settings again: %+v", second.Spec)
	}
	if again.Token == info.Token {
		t.Error("a second run gave the same token")
	}

	// Nobody has joined: everything may still change.
	disabled := false
	b := Broker{Namespace: "twice", ClusterSetID: "prod", ClusterSetIPEnabled: &disabled, Ranges: cidrs("242.0.0.0/8")}
	deploy(t, b)
	want := v1alpha1.ClusterSetConfigSpec{ClusterSetID: "prod", ClusterSetIPCIDRRange: []string{"242.0.0.0/8"}}
	if diff := cmp.Diff(want, get().Spec); diff != "" {
		t.Errorf("settings (-want +have):\n%s", diff)
	}
}

func TestDeployBrokerRefusesItsOwnAddresses(t *testing.T) {
	admin := newClient(t, brokerServer.Config(t))
	for name, rng := range map[string]string{"inside": "10.96.7.0/24", "around": "fd00:96::/48"} {
		t.Run(name, func(t *testing.T) {
			err := await(t.Context(), "no refusal", func() (bool, error) { // ServiceCIDRs are made soon after the start
				_, _, err := DeployBroker(t.Context(), admin, Broker{Namespace: "own-" + name, Ranges: cidrs(rng), TokenTTL: time.Hour})
				return errors.Is(err, ErrOverlap), nil
			})
			if err != nil {
				t.Error(err)
			}
			list := &v1alpha1.ClusterSetConfigList{}
			if err := admin.List(t.Context(), list, client.InNamespace("own-"+name)); err != nil || len(list.Items) != 0 {
				t.Errorf("settings were written: %+v, %v", list.Items, err)
			}
		})
	}
}

func TestJoin(t *testing.T) {
	info, admin := deploy(t, Broker{Namespace: "join", ClusterSetID: "prod", Ranges: cidrs("243.0.0.0/8", "fd00:1:2::/48")})
	// All of a join must work with nothing but the broker-info file.
	broker := newClient(t, info.RESTConfig())
	member := newClient(t, memberServer.Config(t))
	r := request(info, "a.eu", 1)

	j, err := Join(t.Context(), broker, member, r)
	if err != nil {
		t.Fatal(err)
	}
	want := v1alpha1.MemberSpec{
		ClusterID: "a.eu", ClusterSetID: "prod", ClusterSetIPEnabled: true,
		ClusterSetIPCIDR: []string{"243.0.0.0/16", "fd00:1:2::/64"},
		PodCIDRs:         []string{"10.1.0.0/16"}, NodeCIDRs: []string{"192.0.2.1/32"}, ServiceCIDRs: []string{"10.96.0.0/12"},
		JoinTime: j.Member.Spec.JoinTime,
	}
	for where, c := range map[string]struct {
		client.Client
		namespace string
	}{"the broker": {admin, "join"}, "the member": {member, r.Namespace}} {
		m := &v1alpha1.Member{}
		if err := c.Get(t.Context(), client.ObjectKey{Namespace: c.namespace, Name: "a.eu"}, m); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, m.Spec); diff != "" {
			t.Errorf("registration in %s (-want +have):\n%s", where, diff)
		}
	}
	config := &v1alpha1.ClusterSetConfig{}
	if err := admin.Get(t.Context(), client.ObjectKey{Namespace: "join", Name: v1alpha1.ClusterSetConfigName}, config); err != nil {
		t.Fatal(err)
	}
	if len(config.Annotations) != 0 {
		t.Errorf("the reservation is left: %v", config.Annotations)
	}

	// The member's credentials work, in the namespace that they name, and no further than they should.
	secret := &corev1.Secret{}
	if err := member.Get(t.Context(), client.ObjectKey{Namespace: r.Namespace, Name: v1alpha1.BrokerSecret}, secret); err != nil {
		t.Fatal(err)
	}
	loaded, err := clientcmd.NewClientConfigFromBytes(secret.Data[v1alpha1.BrokerSecretKubeconfig])
	if err != nil {
		t.Fatal(err)
	}
	if ns, _, err := loaded.Namespace(); err != nil || ns != "join" {
		t.Errorf("the kubeconfig names namespace %q, %v", ns, err)
	}
	cfg, err := loaded.ClientConfig()
	if err != nil {
		t.Fatal(err)
	}
	asMember := newClient(t, cfg)
	own := &v1alpha1.Member{}
	if err := asMember.Get(t.Context(), client.ObjectKey{Namespace: "join", Name: "a.eu"}, own); err != nil {
		t.Errorf("the member cannot read its registration: %v", err)
	}
	own.Spec.ClusterSetIPCIDR = []string{"243.0.0.0/8"}
	if err := asMember.Update(t.Context(), own); !apierrors.IsForbidden(err) {
		t.Errorf("the member may write its registration: %v", err)
	}
	if err := asMember.List(t.Context(), &corev1.SecretList{}, client.InNamespace("join")); !apierrors.IsForbidden(err) {
		t.Errorf("the member may read the Secrets of others: %v", err)
	}

	// Joining again keeps what it was given; what the cluster says of itself may change.
	r.Addresses.Pods = cidrs("10.1.0.0/16", "10.11.0.0/16")
	r.Blocks = cidrs("243.7.0.0/16")
	again, err := Join(t.Context(), broker, member, r)
	if err != nil {
		t.Fatal(err)
	}
	want.PodCIDRs = []string{"10.1.0.0/16", "10.11.0.0/16"}
	if diff := cmp.Diff(want, again.Member.Spec); diff != "" || !again.Rejoined || len(again.Notes) != 1 {
		t.Errorf("joined again: rejoined %t, notes %q, (-want +have):\n%s", again.Rejoined, again.Notes, diff)
	}

	// The note's way to other blocks works.
	if err := admin.Delete(t.Context(), again.Member); err != nil {
		t.Fatal(err)
	}
	if moved, err := Join(t.Context(), broker, member, r); err != nil || firstBlock(moved) != "243.7.0.0/16" {
		t.Errorf("joined after its Member was deleted: %+v, %v", moved.Member, err)
	}

	// The same cluster under another id, and another cluster under the same id.
	r.ClusterID = "b"
	if _, err := Join(t.Context(), broker, member, r); err == nil || !strings.Contains(err.Error(), "is member a.eu already") {
		t.Errorf("a member joined under another id: %v", err)
	}
	r.ClusterID = "a.eu"
	if _, err := Join(t.Context(), broker, newClient(t, otherServer.Config(t)), r); !errors.Is(err, ErrIDTaken) {
		t.Errorf("another cluster joined under a taken id: %v", err)
	}

	// Now that somebody relies on them, ranges are fixed.
	_, _, err = DeployBroker(t.Context(), admin, Broker{Namespace: "join", Ranges: cidrs("242.0.0.0/8"), TokenTTL: time.Hour})
	if err == nil || !strings.Contains(err.Error(), "cannot change before all have left") {
		t.Errorf("ranges changed under a member: %v", err)
	}
}

func TestJoinRefusesAndWritesNothing(t *testing.T) {
	info, admin := deploy(t, Broker{Namespace: "refuse", Ranges: cidrs("243.0.0.0/14")})
	member := newClient(t, memberServer.Config(t))
	first := request(info, "a", 1)
	first.Blocks = cidrs("243.2.0.0/15")
	if _, err := Join(t.Context(), admin, member, first); err != nil {
		t.Fatal(err)
	}
	tests := map[string]struct {
		change func(*Request)
		want   error // or any, when nil
	}{
		"an id that is none":           {change: func(r *Request) { r.ClusterID = "A" }},
		"pods of another member":       {change: func(r *Request) { r.Addresses.Pods = cidrs("10.1.2.0/24") }, want: ErrOverlap},
		"pods in the range":            {change: func(r *Request) { r.Addresses.Pods = cidrs("243.3.0.0/16") }, want: ErrOverlap},
		"a block outside of the range": {change: func(r *Request) { r.Blocks = cidrs("244.0.0.0/16") }},
		"a block around the range":     {change: func(r *Request) { r.Blocks = cidrs("243.0.0.0/8") }},
		"a block of another member":    {change: func(r *Request) { r.Blocks = cidrs("243.3.0.0/16") }, want: ErrOverlap},
		"a loopback block":             {change: func(r *Request) { r.Blocks = cidrs("127.0.0.0/16") }},
		"no pods anywhere":             {change: func(r *Request) { r.Addresses.Pods = nil }},
	}
	before := state(t, admin, "refuse")
	other := newClient(t, otherServer.Config(t))
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			r := request(info, "b", 2)
			tc.change(&r)
			_, err := Join(t.Context(), admin, other, r)
			if err == nil || tc.want != nil && !errors.Is(err, tc.want) {
				t.Errorf("got %v", err)
			}
			if diff := cmp.Diff(before, state(t, admin, "refuse")); diff != "" {
				t.Errorf("a refused join wrote (-before +after):\n%s", diff)
			}
		})
	}
	// Two blocks are free, then none.
	for i, id := range []clusterset.ClusterID{"c", "d"} {
		r := request(info, id, 10+i)
		if j, err := Join(t.Context(), admin, other, r); err != nil || firstBlock(j) != fmt.Sprintf("243.%d.0.0/16", i) {
			t.Fatalf("join %s: %+v, %v", id, j.Member, err)
		}
	}
	if _, err := Join(t.Context(), admin, other, request(info, "e", 20)); !errors.Is(err, ErrNoBlock) {
		t.Errorf("a join into a full range: %v", err)
	}
}

// firstBlock returns the first block that a join gave, or "".
func firstBlock(j Joined) string {
	if j.Member == nil || len(j.Member.Spec.ClusterSetIPCIDR) == 0 {
		return ""
	}
	return j.Member.Spec.ClusterSetIPCIDR[0]
}

// state lists what stands in the broker's namespace, with versions.
func state(t *testing.T, c client.Client, namespace string) []string {
	t.Helper()
	var found []string
	for kind, l := range map[string]client.ObjectList{
		"Member": &v1alpha1.MemberList{}, "ClusterSetConfig": &v1alpha1.ClusterSetConfigList{},
		"ServiceAccount": &corev1.ServiceAccountList{}, "Secret": &corev1.SecretList{},
	} {
		if err := c.List(t.Context(), l, client.InNamespace(namespace)); err != nil {
			t.Fatal(err)
		}
		err := meta.EachListItem(l, func(o runtime.Object) error {
			obj := o.(client.Object)
			found = append(found, fmt.Sprintf("%s %s %s", kind, obj.GetName(), obj.GetResourceVersion()))
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	slices.Sort(found)
	return found
}

// TestJoinsAtTheSameTime: whatever the order, ids and blocks are given once.
func TestJoinsAtTheSameTime(t *testing.T) {
	info, admin := deploy(t, Broker{Namespace: "together", Ranges: cidrs("243.0.0.0/8", "fd00:1:3::/48")})
	members := []client.Client{newClient(t, memberServer.Config(t)), newClient(t, otherServer.Config(t))}
	const n = 8
	var joins errgroup.Group
	for i := range n {
		joins.Go(func() error {
			_, err := Join(t.Context(), admin, members[i%2], request(info, clusterset.ClusterID(fmt.Sprintf("m%d", i)), i+1))
			return err
		})
	}
	if err := joins.Wait(); err != nil {
		t.Fatal(err)
	}
	list := &v1alpha1.MemberList{}
	if err := admin.List(t.Context(), list, client.InNamespace("together")); err != nil {
		t.Fatal(err)
	}
	given := map[string]string{}
	for _, m := range list.Items {
		for _, block := range m.Spec.ClusterSetIPCIDR {
			if other, ok := given[block]; ok {
				t.Errorf("block %s was given to %s and to %s", block, other, m.Name)
			}
			given[block] = m.Name
		}
	}
	var want []string
	for i := range n {
		want = append(want, fmt.Sprintf("243.%d.0.0/16", i), netip.PrefixFrom(netip.AddrFrom16([16]byte{0xfd, 0, 0, 1, 0, 3, 0, byte(i)}), 64).String())
	}
	slices.Sort(want)
	var have []string
	for block := range given {
		have = append(have, block)
	}
	slices.Sort(have)
	if diff := cmp.Diff(want, have); diff != "" {
		t.Errorf("blocks given (-want +have):\n%s", diff)
	}

	// Two clusters and one id: one of them gets it.
	var taken, joined int
	results := make(chan error, 2)
	for i := range 2 {
		go func() {
			_, err := Join(t.Context(), admin, members[i], request(info, "same", 50+i))
			results <- err
		}()
	}
	for range 2 {
		switch err := <-results; {
		case err == nil:
			joined++
		case errors.Is(err, ErrIDTaken):
			taken++
		default:
			t.Error(err)
		}
	}
	if joined != 1 || taken != 1 {
		t.Errorf("%d clusters joined under one id, %d were refused", joined, taken)
	}
}

// TestJoinAfterACut: a join that died after its reservation is finished by the next, and holds its block
// until then.
func TestJoinAfterACut(t *testing.T) {
	info, admin := deploy(t, Broker{Namespace: "cut", Ranges: cidrs("243.0.0.0/8")})
	member, other := newClient(t, memberServer.Config(t)), newClient(t, otherServer.Config(t))
	dead := &failing{Client: admin}
	if _, err := Join(t.Context(), dead, member, request(info, "a", 1)); !errors.Is(err, errCut) {
		t.Fatalf("the join was not cut: %v", err)
	}
	b, err := Join(t.Context(), admin, other, request(info, "b", 2))
	if err != nil || firstBlock(b) != "243.1.0.0/16" {
		t.Errorf("b got %+v, %v; want the block behind the one that a holds", b.Member, err)
	}
	if _, err := Join(t.Context(), admin, other, request(info, "a", 3)); !errors.Is(err, ErrIDTaken) {
		t.Errorf("another cluster got the id of a join under way: %v", err)
	}
	a, err := Join(t.Context(), admin, member, request(info, "a", 1))
	if err != nil || firstBlock(a) != "243.0.0.0/16" {
		t.Errorf("a got %+v, %v; want the block it had reserved", a.Member, err)
	}
}

var errCut = errors.New("cut")

// failing is a client whose Apply never arrives.
type failing struct{ client.Client }

func (*failing) Apply(context.Context, runtime.ApplyConfiguration, ...client.ApplyOption) error {
	return errCut
}

func TestDiscover(t *testing.T) {
	c := newClient(t, memberServer.Config(t))
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "n1"},
		Spec:       corev1.NodeSpec{PodCIDR: "10.7.1.0/24", PodCIDRs: []string{"10.7.1.0/24", "fd00:7:1::/64"}},
	}
	if err := c.Create(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Delete(context.Background(), node); err != nil {
			t.Error(err)
		}
	})
	node.Status.Addresses = []corev1.NodeAddress{
		{Type: corev1.NodeInternalIP, Address: "192.0.2.7"},
		{Type: corev1.NodeInternalIP, Address: "2001:db8::7"},
		{Type: corev1.NodeHostName, Address: "n1"},
		{Type: corev1.NodeExternalIP, Address: "198.51.100.7"},
	}
	if err := c.Status().Update(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	var found Addresses
	err := await(t.Context(), "no ServiceCIDR", func() (bool, error) { // made by the API server soon after its start
		var err error
		found, err = discover(t.Context(), c)
		return len(found.Services) > 0, err
	})
	if err != nil {
		t.Fatal(err)
	}
	want := Addresses{
		Pods:     cidrs("10.7.1.0/24", "fd00:7:1::/64"),
		Nodes:    cidrs("192.0.2.7/32", "2001:db8::7/128"),
		Services: cidrs("10.96.0.0/16", "fd00:96::/112"),
	}
	if diff := cmp.Diff(want, found, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); diff != "" {
		t.Errorf("found (-want +have):\n%s", diff)
	}
	given := Addresses{Pods: cidrs("10.7.0.0/16")}
	if got := given.orElse(found); got.Pods[0].Bits() != 16 || len(got.Nodes) != 2 {
		t.Errorf("what is given does not replace what is found: %+v", got)
	}
}
