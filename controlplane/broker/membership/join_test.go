package membership

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	mcsv1beta1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/about"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/admin"
	"github.com/isthmus-net/isthmus/tools/conformance"
)

func TestJoin(t *testing.T) {
	info, asAdmin := deploy(t, Broker{
		Namespace: "join", ClusterSetID: "prod", Ranges: cidrs("243.0.0.0/8", "fd00:1:2::/48"),
		Settings: v1alpha1.Settings{TypeConflict: v1alpha1.TypeConflictExclude},
	})
	// The broker-info file alone must suffice for a join, and an invitation for a later one.
	broker := newClient(t, info.RESTConfig())
	member := cluster(t, &memberServer)
	r := request(info, "a.eu", 1)
	r.Addresses.Extra = cidrs("198.51.100.0/24")

	j, err := Join(t.Context(), broker, member, r)
	if err != nil {
		t.Fatal(err)
	}
	want := v1alpha1.MemberSpec{
		ClusterID: "a.eu", ClusterSetID: "prod", ClusterSetIPEnabled: true,
		ClusterSetIPCIDR: []string{"243.0.0.0/16", "fd00:1:2::/64"},
		PodCIDRs:         []string{"10.1.0.0/16"}, NodeCIDRs: []string{"192.0.2.1/32"}, ServiceCIDRs: []string{"10.96.0.0/12"},
		ExtraCIDRs: []string{"198.51.100.0/24"},
		JoinTime:   j.Member.Spec.JoinTime,
		Settings:   v1alpha1.Settings{TypeConflict: v1alpha1.TypeConflictExclude},
	}
	for where, c := range map[string]struct {
		client.Client
		namespace string
	}{"the broker": {asAdmin, "join"}, "the member": {member, r.Namespace}} {
		m := &v1alpha1.Member{}
		if err := c.Get(t.Context(), client.ObjectKey{Namespace: c.namespace, Name: "a.eu"}, m); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, m.Spec); diff != "" {
			t.Errorf("registration in %s (-want +have):\n%s", where, diff)
		}
	}
	conformance.Holds(t, "K1", "V3", "V40")
	config := brokerConfig(t, asAdmin, "join")
	if len(config.Annotations) != 0 {
		t.Errorf("the reservation is left: %v", config.Annotations)
	}
	blocks := []v1alpha1.MemberBlocks{{ClusterID: "a.eu", ClusterSetIPCIDR: want.ClusterSetIPCIDR}}
	if diff := cmp.Diff(blocks, config.Spec.Members, cmpopts.IgnoreFields(v1alpha1.MemberBlocks{}, "Credential")); diff != "" {
		t.Errorf("blocks of all members (-want +have):\n%s", diff)
	}
	if have := blocksOnBroker(t, asAdmin, "join"); have != `[{"cluster_id":"a.eu","global_cidr":["243.0.0.0/16","fd00:1:2::/64"]}]` {
		t.Errorf("the ConfigMap says %s", have)
	}

	// The member's credentials are valid in their namespace, with the intended rights only.
	cfg := credentials(t, member, r.Namespace)
	if filepath.Base(cfg.BearerTokenFile) != v1alpha1.BrokerSecretToken {
		t.Errorf("the token comes from %q, which no process reads again", cfg.BearerTokenFile)
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

	// Joining again keeps the allocated values, and the values of earlier flags.
	r.Addresses = Addresses{Pods: cidrs("10.1.0.0/16", "10.11.0.0/16")}
	r.Blocks = cidrs("243.7.0.0/16")
	awaitPolicies(t, broker, "join")
	if _, err := Join(t.Context(), broker, member, r); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "it joins with an invitation: isthmusctl invite") {
		t.Errorf("joined again with a broker-info file: %v", err)
	}
	r.Broker = invite(t, asAdmin, info, "a.eu")
	broker = newClient(t, r.Broker.RESTConfig())
	again, err := Join(t.Context(), broker, member, r)
	if err != nil {
		t.Fatal(err)
	}
	want.PodCIDRs = []string{"10.1.0.0/16", "10.11.0.0/16"}
	if diff := cmp.Diff(want, again.Member.Spec); diff != "" || !again.Rejoined || len(again.Notes) != 1 {
		t.Errorf("joined again: rejoined %t, notes %q, (-want +have):\n%s", again.Rejoined, again.Notes, diff)
	}
	conformance.Holds(t, "L37")
	wantSources := []string{"pods --pod-cidr", "nodes as given before", "services as given before", "extra as given before"}
	var sources []string
	for _, s := range again.Sources {
		sources = append(sources, s.Kind+" "+s.From)
	}
	if diff := cmp.Diff(wantSources, sources); diff != "" {
		t.Errorf("sources (-want +have):\n%s", diff)
	}

	// Likewise the URL of the broker.
	for _, step := range []struct {
		server *string
		want   string
	}{{new("https://192.0.2.9:6443"), "https://192.0.2.9:6443"}, {nil, "https://192.0.2.9:6443"}, {new(""), info.Server}, {nil, info.Server}} {
		r.Server, r.Broker = step.server, invite(t, asAdmin, info, "a.eu")
		if _, err := Join(t.Context(), newClient(t, r.Broker.RESTConfig()), member, r); err != nil {
			t.Fatal(err)
		}
		if have := credentials(t, member, r.Namespace).Host; have != step.want {
			t.Errorf("the member reaches the broker at %s, want %s", have, step.want)
		}
	}

	// The same cluster under another id, and another cluster under the same id.
	r.ClusterID, r.Broker = "b", info
	broker = newClient(t, info.RESTConfig())
	if _, err := Join(t.Context(), broker, member, r); err == nil || !strings.Contains(err.Error(), "is member a.eu already") {
		t.Errorf("a member joined under another id: %v", err)
	}
	r.ClusterID = "a.eu"
	if _, err := Join(t.Context(), broker, cluster(t, &otherServer), r); !errors.Is(err, ErrIDTaken) {
		t.Errorf("another cluster joined under a taken id: %v", err)
	}

	// With a member the ranges are immutable.
	_, err = DeployBroker(t.Context(), asAdmin, Broker{Namespace: "join", Ranges: cidrs("242.0.0.0/8"), TokenTTL: time.Hour})
	if err == nil || !strings.Contains(err.Error(), "cannot change before all have left") {
		t.Errorf("ranges changed under a member: %v", err)
	}
}

func brokerConfig(t *testing.T, asAdmin client.Client, namespace string) *v1alpha1.ClusterSetConfig {
	t.Helper()
	config, err := readConfig(t.Context(), asAdmin, namespace)
	if err != nil {
		t.Fatal(err)
	}
	return config
}

// blocksOnBroker returns the blocks of all members in Submariner's format.
func blocksOnBroker(t *testing.T, asAdmin client.Client, namespace string) string {
	t.Helper()
	m := &corev1.ConfigMap{}
	if err := asAdmin.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: v1alpha1.ClusterSetIPConfigMap}, m); err != nil {
		t.Fatal(err)
	}
	return m.Data["clusterinfo"]
}

// Each join applies the settings of the ClusterSet. A flag of join overrides them, also at later joins without the
// flag.
func TestChangedSettings(t *testing.T) {
	info, asAdmin := deploy(t, Broker{Namespace: "settings", Ranges: cidrs("243.0.0.0/8")})
	yes, no := true, false
	join := func(change func(*Request)) v1alpha1.MemberSpec {
		t.Helper()
		r := request(info, "a", 1)
		change(&r)
		j, err := reserve(t, asAdmin, "uid", r)
		if err != nil {
			t.Fatal(err)
		}
		return j.Member.Spec
	}
	first := join(func(*Request) {})
	if !first.ClusterSetIPEnabled || first.Settings != (v1alpha1.Settings{}) {
		t.Errorf("at first %+v", first)
	}
	lighthouse := Broker{Namespace: "settings", Settings: v1alpha1.Settings{Profile: v1alpha1.ProfileLighthouse}, TokenTTL: time.Hour}
	d, err := DeployBroker(t.Context(), asAdmin, lighthouse)
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{"members apply changed settings when they join again: a"}; !slices.Equal(d.Notes, want) {
		t.Errorf("notes %q, want %q", d.Notes, want)
	}
	second := join(func(*Request) {})
	if second.ClusterSetIPEnabled || second.Profile != v1alpha1.ProfileLighthouse || !slices.Equal(second.ClusterSetIPCIDR, first.ClusterSetIPCIDR) || !second.JoinTime.Equal(&first.JoinTime) {
		t.Errorf("after the ClusterSet's settings changed %+v", second)
	}
	if third := join(func(r *Request) { r.ClusterSetIPEnabled = &yes }); !third.ClusterSetIPEnabled {
		t.Error("the flag does not count")
	}
	if fourth := join(func(*Request) {}); !fourth.ClusterSetIPEnabled {
		t.Error("what the flag said is forgotten")
	}
	if fifth := join(func(r *Request) { r.ClusterSetIPEnabled = &no }); fifth.ClusterSetIPEnabled {
		t.Error("the flag does not count the second time")
	}
	conformance.Holds(t, "V38")
	// An empty flag discards its earlier value for the discovered one.
	r := request(info, "a", 1)
	r.Addresses.Services = []netip.Prefix{}
	j, err := Request.decide(r, must(readReservations(t.Context(), asAdmin, "settings")), "uid", discovery{services: []Found{{cidrs("10.7.0.0/16"), "here"}}})
	if err != nil || !slices.Equal(j.Member.Spec.ServiceCIDRs, []string{"10.7.0.0/16"}) || strings.Contains(j.Member.Annotations[annotationGiven], "service") {
		t.Errorf("the service CIDRs are %v, given is %q, %v", j.Member.Spec.ServiceCIDRs, j.Member.Annotations[annotationGiven], err)
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func TestJoinRefusesAndWritesNothing(t *testing.T) {
	info, asAdmin := deploy(t, Broker{Namespace: "refuse", ClusterSetID: "prod", Ranges: cidrs("243.0.0.0/14")})
	first := request(info, "a", 1)
	first.Blocks = cidrs("243.2.0.0/15")
	if _, err := reserve(t, asAdmin, "uid of a", first); err != nil {
		t.Fatal(err)
	}
	const of = "of a ClusterSet need distinct CIDRs, or give the right one with "
	tests := map[string]struct {
		change func(*Request)
		want   error  // or any, when nil
		text   string // a part of the sentence
	}{
		"an invalid id":                   {func(r *Request) { r.ClusterID = "A" }, nil, "not an RFC 1123 label"},
		"no id":                           {func(r *Request) { r.ClusterID = "" }, nil, "this cluster has no id: it has no ClusterProperty cluster.clusterset.k8s.io; give it a unique id with --clusterid"},
		"the id of another cluster":       {func(r *Request) { r.ClusterID = "a" }, ErrIDTaken, "cluster id is taken: another cluster joined as a on 20"},
		"pods of another member":          {func(r *Request) { r.Addresses.Pods = cidrs("10.1.2.0/24") }, ErrOverlap, "addresses overlap: pod CIDR 10.1.2.0/24 of this cluster and 10.1.0.0/16 of member a; the clusters " + of + "--pod-cidr"},
		"an extra CIDR of another member": {func(r *Request) { r.Addresses.Extra = cidrs("192.0.2.0/24") }, ErrOverlap, "the clusters " + of + "--extra-cidr"},
		"pods in the ClusterSetIP range":  {func(r *Request) { r.Addresses.Pods = cidrs("243.3.0.0/16") }, ErrOverlap, "pod CIDR 243.3.0.0/16 of this cluster lies in the range 243.0.0.0/14 of ClusterSetIPs"},
		"a block outside of the range":    {func(r *Request) { r.Blocks = cidrs("244.0.0.0/16") }, nil, "--clusterset-ip-cidr 244.0.0.0/16 lies outside of the ClusterSet's ranges [243.0.0.0/14]; choose a part of them"},
		"a block around the range":        {func(r *Request) { r.Blocks = cidrs("243.0.0.0/8") }, nil, "lies outside of the ClusterSet's ranges"},
		"a block of another member":       {func(r *Request) { r.Blocks = cidrs("243.3.0.0/16") }, ErrOverlap, "--clusterset-ip-cidr 243.3.0.0/16 and block 243.2.0.0/15 of member a; choose another block"},
		"a loopback block":                {func(r *Request) { r.Blocks = cidrs("127.0.0.0/16") }, nil, "contains unspecified, loopback, link-local"},
		"a link-local block":              {func(r *Request) { r.Blocks = cidrs("169.254.0.0/16") }, nil, "contains unspecified, loopback, link-local"},
		"no pod CIDR found":               {func(r *Request) { r.Addresses.Pods = nil }, nil, "no pod CIDR found on any node of the cluster; give --pod-cidr"},
		"a namespace without a broker":    {func(r *Request) { r.Broker.Namespace = "default" }, ErrNoBroker, "it has no ClusterSetConfig default/clusterset"},
	}
	other := cluster(t, &otherServer)
	before, there := state(t, asAdmin, "refuse"), state(t, other, "refuse-b")
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			r := request(info, "b", 2)
			tc.change(&r)
			_, err := Join(t.Context(), asAdmin, other, r)
			if err == nil || tc.want != nil && !errors.Is(err, tc.want) || !strings.Contains(err.Error(), tc.text) {
				t.Errorf("got %v", err)
			}
			if diff := cmp.Diff(before, state(t, asAdmin, "refuse")); diff != "" {
				t.Errorf("a refused join wrote on the broker (-before +after):\n%s", diff)
			}
			if diff := cmp.Diff(there, state(t, other, "refuse-b")); diff != "" {
				t.Errorf("a refused join wrote in the member (-before +after):\n%s", diff)
			}
		})
	}
	conformance.Holds(t, "K3")
	// Two blocks are free, then none.
	for i, id := range []clusterset.ClusterID{"c", "d"} {
		r := request(info, id, 10+i)
		if j, err := reserve(t, asAdmin, "uid", r); err != nil || firstBlock(j) != fmt.Sprintf("243.%d.0.0/16", i) {
			t.Fatalf("join %s: %+v, %v", id, j.Member, err)
		}
	}
	if _, err := Join(t.Context(), asAdmin, other, request(info, "e", 20)); !errors.Is(err, ErrNoBlock) {
		t.Errorf("a join into a full range: %v", err)
	}
	conformance.Holds(t, "L37")
}

// firstBlock returns the first block of a join, or "".
func firstBlock(j Joined) string {
	if j.Member == nil || len(j.Member.Spec.ClusterSetIPCIDR) == 0 {
		return ""
	}
	return j.Member.Spec.ClusterSetIPCIDR[0]
}

// state lists the objects in a namespace with their versions, and the cluster's ClusterProperties.
func state(t *testing.T, c client.Client, namespace string) []string {
	t.Helper()
	var found []string
	for kind, l := range map[string]client.ObjectList{
		"Member": &v1alpha1.MemberList{}, "ClusterSetConfig": &v1alpha1.ClusterSetConfigList{},
		"ServiceAccount": &corev1.ServiceAccountList{}, "Secret": &corev1.SecretList{}, "ConfigMap": &corev1.ConfigMapList{},
		"ExportRecord": &v1alpha1.ExportRecordList{}, "ServiceImport": &mcsv1beta1.ServiceImportList{},
		"ClusterProperty": &about.ClusterPropertyList{},
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

// Concurrent joins get distinct ids and blocks.
func TestConcurrentJoins(t *testing.T) {
	info, asAdmin := deploy(t, Broker{Namespace: "together", Ranges: cidrs("243.0.0.0/8", "fd00:1:3::/48")})
	const n = 8
	var joins errgroup.Group
	for i := range n {
		joins.Go(func() error {
			id := fmt.Sprintf("m%d", i)
			_, err := reserve(t, asAdmin, "uid of "+id, request(info, clusterset.ClusterID(id), i+1))
			return err
		})
	}
	if err := joins.Wait(); err != nil {
		t.Fatal(err)
	}
	list := &v1alpha1.MemberList{}
	if err := asAdmin.List(t.Context(), list, client.InNamespace("together")); err != nil {
		t.Fatal(err)
	}
	given := map[string]string{}
	var listed []v1alpha1.MemberBlocks
	for _, m := range list.Items {
		listed = withBlocks(listed, m.Name, m.Spec.ClusterSetIPCIDR)
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
	conformance.Holds(t, "L37")
	// All lists of the blocks agree.
	config := brokerConfig(t, asAdmin, "together")
	if diff := cmp.Diff(listed, config.Spec.Members, cmpopts.IgnoreFields(v1alpha1.MemberBlocks{}, "Credential")); diff != "" || len(config.Annotations) > 0 {
		t.Errorf("the ClusterSetConfig has annotations %v, and members (-want +have):\n%s", config.Annotations, diff)
	}
	wantTexts, err := blocksText(config.Spec)
	if err != nil {
		t.Fatal(err)
	}
	if have := blocksOnBroker(t, asAdmin, "together"); have != wantTexts["clusterinfo"] {
		t.Errorf("the ConfigMap says\n%s, want\n%s", have, wantTexts["clusterinfo"])
	}

	// One of two clusters with the same id gets it.
	var taken, joined int
	results := make(chan error, 2)
	for i := range 2 {
		go func() {
			_, err := reserve(t, asAdmin, fmt.Sprint("cluster ", i), request(info, "same", 50+i))
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

// A join that was interrupted after its reservation is completed by the next one, and reserves its block until then.
func TestInterruptedJoin(t *testing.T) {
	info, asAdmin := deploy(t, Broker{Namespace: "cut", Ranges: cidrs("243.0.0.0/8")})
	dead := &failing{Client: asAdmin}
	if _, err := reserve(t, dead, "a", request(info, "a", 1)); !errors.Is(err, errCut) {
		t.Fatalf("the join was not cut: %v", err)
	}
	b, err := reserve(t, asAdmin, "b", request(info, "b", 2))
	if err != nil || firstBlock(b) != "243.1.0.0/16" {
		t.Errorf("b got %+v, %v; want the block behind the one that a holds", b.Member, err)
	}
	if _, err := reserve(t, asAdmin, "b", request(info, "a", 3)); !errors.Is(err, ErrIDTaken) {
		t.Errorf("another cluster got the id of a join under way: %v", err)
	}
	a, err := reserve(t, asAdmin, "a", request(info, "a", 1))
	if err != nil || firstBlock(a) != "243.0.0.0/16" || a.Rejoined {
		t.Errorf("a got %+v, %v; want the block it had reserved", a.Member, err)
	}
	// An interrupted join can be removed.
	if _, err := reserve(t, dead, "c", request(info, "c", 4)); !errors.Is(err, errCut) {
		t.Fatalf("the join was not cut: %v", err)
	}
	if _, err := ForceLeave(t.Context(), asAdmin, "cut", "c"); err != nil {
		t.Error(err)
	}
	if c, err := reserve(t, asAdmin, "another", request(info, "c", 4)); err != nil || firstBlock(c) != "243.2.0.0/16" {
		t.Errorf("c got %+v, %v", c.Member, err)
	}
}

var errCut = errors.New("cut")

// failing is a client whose Apply never arrives.
type failing struct{ client.Client }

func (*failing) Apply(context.Context, runtime.ApplyConfiguration, ...client.ApplyOption) error {
	return errCut
}

// A member has its id and ClusterSet as ClusterProperties (KEP-2149), which are immutable during the membership.
func TestIdentity(t *testing.T) {
	info, asAdmin := deploy(t, Broker{Namespace: "identity", ClusterSetID: "prod", Ranges: cidrs("243.0.0.0/8")})
	member := cluster(t, &memberServer)
	said := func(name string) string {
		t.Helper()
		value, err := property(t.Context(), member, name)
		if err != nil {
			t.Fatal(err)
		}
		return value
	}
	// The cluster has an id of its own, which join need not repeat and leave keeps.
	theirs := &about.ClusterProperty{ObjectMeta: metav1.ObjectMeta{Name: about.ClusterID}, Spec: about.ClusterPropertySpec{Value: "a.eu"}}
	if err := member.Create(t.Context(), theirs); err != nil {
		t.Fatal(err)
	}
	r := request(info, "", 1)
	r.Namespace = "identity-a"
	wrong := r
	wrong.ClusterID = "b"
	if _, err := Join(t.Context(), asAdmin, member, wrong); err == nil || !strings.Contains(err.Error(), "of this cluster is a.eu, but --clusterid is b; join as a.eu, or change the property first") {
		t.Errorf("joined under another id: %v", err)
	}
	elsewhere := &about.ClusterProperty{ObjectMeta: metav1.ObjectMeta{Name: about.ClusterSet}, Spec: about.ClusterPropertySpec{Value: "test"}}
	if err := member.Create(t.Context(), elsewhere); err != nil {
		t.Fatal(err)
	}
	if _, err := Join(t.Context(), asAdmin, member, r); err == nil || !strings.Contains(err.Error(), "of this cluster names ClusterSet test; let it leave that before it joins prod") {
		t.Errorf("a member of another ClusterSet joined: %v", err)
	}
	if err := member.Delete(t.Context(), elsewhere); err != nil {
		t.Fatal(err)
	}
	j, err := Join(t.Context(), asAdmin, member, r)
	if err != nil {
		t.Fatal(err)
	}
	if j.Member.Name != "a.eu" || said(about.ClusterID) != "a.eu" || said(about.ClusterSet) != "prod" {
		t.Errorf("joined as %s; it says that it is %q of %q", j.Member.Name, said(about.ClusterID), said(about.ClusterSet))
	}
	if err := member.Get(t.Context(), client.ObjectKey{Name: about.ClusterID}, theirs); err != nil || len(theirs.Labels) > 0 {
		t.Errorf("their own property became ours: %v, %v", theirs.Labels, err)
	}

	// Neither can be changed or deleted. The API server needs a moment to know of the policy.
	for _, name := range []string{about.ClusterID, about.ClusterSet} {
		refused := func(what string, try func(*about.ClusterProperty, ...client.DeleteOption) error) {
			t.Helper()
			err := admin.Await(t.Context(), what+" "+name+" is not refused", func() (bool, error) {
				p := &about.ClusterProperty{}
				if err := member.Get(t.Context(), client.ObjectKey{Name: name}, p); err != nil {
					return false, err
				}
				err := try(p)
				if err == nil {
					return false, nil
				}
				if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "cannot change before isthmusctl leave") {
					return false, err
				}
				return true, nil
			})
			if err != nil {
				t.Error(err)
			}
		}
		refused("to change", func(p *about.ClusterProperty, _ ...client.DeleteOption) error {
			p.Spec.Value += "x"
			return member.Update(t.Context(), p, client.DryRunAll)
		})
		refused("to delete", func(p *about.ClusterProperty, _ ...client.DeleteOption) error {
			return member.Delete(t.Context(), p, client.DryRunAll)
		})
	}
	p := &about.ClusterProperty{}
	if err := member.Get(t.Context(), client.ObjectKey{Name: about.ClusterID}, p); err != nil {
		t.Fatal(err)
	}
	p.Labels = map[string]string{"region": "eu"}
	if err := member.Update(t.Context(), p); err != nil {
		t.Errorf("a label cannot be set: %v", err)
	}
	other := &about.ClusterProperty{ObjectMeta: metav1.ObjectMeta{Name: "fleet.example.org"}, Spec: about.ClusterPropertySpec{Value: "blue"}}
	if err := errors.Join(member.Create(t.Context(), other), member.Delete(t.Context(), other)); err != nil {
		t.Errorf("other properties are kept too: %v", err)
	}
	if _, err := Join(t.Context(), asAdmin, member, r); err != nil {
		t.Errorf("joined again: %v", err)
	}

	// After it has left, its own id stays and the ClusterSet's is gone.
	if _, err := Leave(t.Context(), asAdmin, member, r.Namespace); err != nil {
		t.Fatal(err)
	}
	if said(about.ClusterID) != "a.eu" || said(about.ClusterSet) != "" {
		t.Errorf("after it has left it says that it is %q of %q", said(about.ClusterID), said(about.ClusterSet))
	}
	if err := member.Delete(t.Context(), p); err != nil {
		t.Errorf("its id cannot be deleted now: %v", err)
	}
	// An id that join wrote is removed with the membership.
	r.ClusterID, r.Addresses = "b", request(info, "b", 2).Addresses
	if _, err := Join(t.Context(), asAdmin, member, r); err != nil {
		t.Fatal(err)
	}
	if _, err := Leave(t.Context(), asAdmin, member, r.Namespace); err != nil {
		t.Fatal(err)
	}
	if said(about.ClusterID) != "" || said(about.ClusterSet) != "" {
		t.Errorf("after it has left it says that it is %q of %q", said(about.ClusterID), said(about.ClusterSet))
	}
	conformance.Holds(t, "N49")
}
