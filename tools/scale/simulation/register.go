package simulation

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/access"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker/membership"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/tools/scale/internal/meter"
)

// vips contains the ClusterSetIPs. Each member has a /18 of it, enough for 1000 members. Addresses that all members share are
// allocated by index.
var vips = netip.MustParsePrefix("243.0.0.0/8")

const blockOfVIPs = 14 // bits

// joined is the time when all members joined, long before their exports.
var joined = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// simulatedID names the i-th simulated member.
func simulatedID(i int) clusterset.ClusterID { return clusterset.ClusterID(fmt.Sprintf("s%d", i+1)) }

// accountOf returns the broker user of member id: the ServiceAccount that join creates for it.
func accountOf(id clusterset.ClusterID) string {
	return "system:serviceaccount:" + v1alpha1.DefaultBrokerNamespace + ":" + v1alpha1.MemberAccount(string(id))
}

// ids returns all members. The index of a member determines its addresses.
func (w *ClusterSet) ids() []clusterset.ClusterID {
	ids := []clusterset.ClusterID{importerID, exporterID}
	for i := range w.cfg.Members {
		ids = append(ids, simulatedID(i))
	}
	return ids
}

// podBlock returns the range of endpoint addresses of the n-th member.
func (w *ClusterSet) podBlock(n int) netip.Prefix {
	size := w.cfg.blockBits()
	return netip.PrefixFrom(nth(pods.Addr(), n<<size), 32-size)
}

// nth returns the address n after a.
func nth(a netip.Addr, n int) netip.Addr {
	b := a.As4()
	binary.BigEndian.PutUint32(b[:], binary.BigEndian.Uint32(b[:])+uint32(n))
	return netip.AddrFrom4(b)
}

// registration returns the Member of the n-th member, without a namespace.
func (w *ClusterSet) registration(n int) *v1alpha1.Member {
	id := string(w.ids()[n])
	return &v1alpha1.Member{
		ObjectMeta: metav1.ObjectMeta{Name: id, Labels: map[string]string{v1alpha1.LabelCluster: id}},
		Spec: v1alpha1.MemberSpec{
			ClusterID:           id,
			ClusterSetID:        "scale",
			ClusterSetIPEnabled: true,
			ClusterSetIPCIDR:    []string{netip.PrefixFrom(nth(vips.Addr(), n<<blockOfVIPs), 32-blockOfVIPs).String()},
			PodCIDRs:            []string{w.podBlock(n).String()},
			JoinTime:            metav1.NewTime(joined),
		},
	}
}

// register sets up the broker, and registers all members.
func (w *ClusterSet) register(ctx context.Context) error {
	w.say("deploy the broker and register %d members", len(w.ids()))
	broker := membership.Broker{
		Namespace: v1alpha1.DefaultBrokerNamespace, ClusterSetID: "scale", Ranges: []netip.Prefix{vips},
		TokenTTL: time.Hour, Server: w.broker.Address(),
	}
	if _, err := membership.DeployBroker(ctx, w.admin, broker); err != nil {
		return err
	}
	meta := metav1.ObjectMeta{Namespace: broker.Namespace, Name: "scale-member"}
	everybody := &rbacv1.RoleBinding{ObjectMeta: meta, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: meta.Name}}
	objects := []client.Object{&rbacv1.Role{ObjectMeta: meta, Rules: access.MemberBrokerRules()}, everybody}
	for n, id := range w.ids() {
		m := w.registration(n)
		m.Namespace = broker.Namespace
		objects = append(objects, m)
		everybody.Subjects = append(everybody.Subjects, rbacv1.Subject{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: accountOf(id)})
	}
	for _, obj := range objects {
		if err := w.admin.Create(ctx, obj); err != nil {
			return fmt.Errorf("on the broker: %w", err)
		}
	}
	if err := w.listBlocks(ctx); err != nil {
		return err
	}
	for _, m := range []*member{w.a, w.b} {
		if m == nil {
			continue
		}
		if err := w.equip(ctx, m); err != nil {
			return err
		}
	}
	return nil
}

// listBlocks registers the members with the broker's admission policies, as join does.
func (w *ClusterSet) listBlocks(ctx context.Context) error {
	config := &v1alpha1.ClusterSetConfig{}
	key := client.ObjectKey{Namespace: v1alpha1.DefaultBrokerNamespace, Name: v1alpha1.ClusterSetConfigName}
	if err := w.admin.Get(ctx, key, config); err != nil {
		return fmt.Errorf("read ClusterSetConfig %s: %w", key, err)
	}
	for n, id := range w.ids() {
		blocks := v1alpha1.MemberBlocks{ClusterID: string(id), ClusterSetIPCIDR: w.registration(n).Spec.ClusterSetIPCIDR}
		config.Spec.Members = append(config.Spec.Members, blocks)
	}
	if err := w.admin.Update(ctx, config); err != nil {
		return fmt.Errorf("list the members' blocks: %w", err)
	}
	return nil
}

// equip gives a real member its registration, and the credentials for the broker.
func (w *ClusterSet) equip(ctx context.Context, m *member) error {
	counted, err := meter.New(ctx, w.broker.Address())
	if err != nil {
		return err
	}
	m.meter = counted
	w.onClose(func() error { counted.Close(); return nil })
	err = w.broker.WriteKubeconfig(m.path("broker.kubeconfig"), accountOf(m.id), counted.Address(), v1alpha1.DefaultBrokerNamespace)
	if err != nil {
		return err
	}
	n := map[clusterset.ClusterID]int{importerID: 0, exporterID: 1}[m.id]
	registration := w.registration(n)
	registration.Namespace = v1alpha1.DefaultNamespace
	if err := m.client.Create(ctx, registration); err != nil {
		return fmt.Errorf("register %s in itself: %w", m.id, err)
	}
	return nil
}
