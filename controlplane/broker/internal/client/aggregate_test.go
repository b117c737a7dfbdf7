package client

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker/internal/quota"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

// An exporter whose cache lacks an aggregate replaces the choice against addresses that it finds on the broker, and logs that.
func TestIgnoredChoiceIsLogged(t *testing.T) {
	t.Parallel()
	b := newQuotaBroker(t, quota.Defaults())
	var log bytes.Buffer
	b.cfg.Log = slog.New(slog.NewTextHandler(&log, nil))
	name := webService(1)
	declined := mcs.Aggregate(clusterset.Aggregate{Service: name, Type: clusterset.ClusterSetIP, UseIP: clusterset.Disabled})
	declined.Namespace = "broker"
	if err := b.fake.Create(t.Context(), declined); err != nil {
		t.Fatal(err)
	}
	vip := netip.MustParseAddr("243.0.0.1")
	found, si, err := b.read(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	have, err := b.complete(t.Context(), found, si, clusterset.Aggregate{
		Service: name, Type: clusterset.ClusterSetIP, IPs: []netip.Addr{vip}, AllocatedBy: "west", UseIP: clusterset.Enabled,
	})
	if err != nil || have.UseIP != clusterset.Enabled || len(have.IPs) != 1 {
		t.Errorf("the aggregate is %+v: %v", have, err)
	}
	if !strings.Contains(log.String(), clusterset.ChoiceIgnored) || !strings.Contains(log.String(), "service="+name.Name) {
		t.Errorf("the log does not say that the choice is ignored: %s", log.String())
	}
}

// Each address is checked against the block of its own owner. An invalid second one costs only itself.
func TestAddressesOfAnAggregateAreVetted(t *testing.T) {
	t.Parallel()
	b := newQuotaBroker(t, quota.Defaults())
	for id, block := range map[string]string{"east": "fd00:243:1::/64", "west": "243.2.0.0/16"} {
		b.member(&v1alpha1.Member{ObjectMeta: metav1.ObjectMeta{Name: id}, Spec: v1alpha1.MemberSpec{ClusterID: id, PodCIDRs: []string{"10.0.0.0/8"}, ClusterSetIPCIDR: []string{block}}}, true)
	}
	const six, four = "fd00:243:1::1", "243.2.0.1"
	for name, tt := range map[string]struct {
		extender clusterset.ClusterID
		ips      []string
		want     int
	}{
		"each of its owner's block":              {"west", []string{six, four}, 2},
		"the second of nobody's block":           {"west", []string{six, "243.3.0.1"}, 1},
		"the second without its extender":        {"", []string{six, four}, 1},
		"the first of another's block":           {"west", []string{"fd00:243:2::1", four}, 0},
		"an extender of the only address":        {"west", []string{six}, 1},
		"the extender's address, which is alone": {"west", []string{four}, 0},
	} {
		a := clusterset.Aggregate{Service: webService(1), AllocatedBy: "east", ExtendedBy: tt.extender}
		for _, ip := range tt.ips {
			a.IPs = append(a.IPs, netip.MustParseAddr(ip))
		}
		if have := b.vetAggregate(a).IPs; !slices.Equal(have, a.IPs[:tt.want]) {
			t.Errorf("%s: %v of %v count, want the first %d", name, have, a.IPs, tt.want)
		}
	}
}

// A broker with older policies refuses the second address. The claim succeeds all the same.
func TestRefusedExtension(t *testing.T) {
	t.Parallel()
	b := newQuotaBroker(t, quota.Defaults())
	name := webService(1)
	six, four := netip.MustParseAddr("fd00:243:1::1"), netip.MustParseAddr("243.2.0.1")
	b.member(&v1alpha1.Member{ObjectMeta: metav1.ObjectMeta{Name: "west"}, Spec: v1alpha1.MemberSpec{ClusterID: "west", PodCIDRs: []string{"10.0.0.0/8"}, ClusterSetIPCIDR: []string{"243.2.0.0/16"}}}, true)
	si := mcs.Aggregate(clusterset.Aggregate{Service: name, Type: clusterset.ClusterSetIP, IPs: []netip.Addr{six}, AllocatedBy: "east", UseIP: clusterset.Enabled, Clusters: []clusterset.ClusterID{"west"}})
	si.Namespace = "broker"
	if err := b.fake.Create(t.Context(), si); err != nil {
		t.Fatal(err)
	}
	want := clusterset.Aggregate{
		Service: name, Type: clusterset.ClusterSetIP, IPs: []netip.Addr{six, four}, AllocatedBy: "east", ExtendedBy: "west", UseIP: clusterset.Enabled,
	}
	old := true
	b.client = interceptor.NewClient(b.fake, interceptor.Funcs{
		Update: func(ctx context.Context, c client.WithWatch, obj client.Object, opts ...client.UpdateOption) error {
			if old && obj.GetAnnotations()[v1alpha1.AnnotationExtendedBy] != "" {
				return apierrors.NewForbidden(schema.GroupResource{Resource: "serviceimports"}, obj.GetName(), errors.New("ValidatingAdmissionPolicy"))
			}
			return c.Update(ctx, obj, opts...)
		},
	})
	for _, ips := range []int{1, 2} {
		have, err := b.Claim(t.Context(), want)
		if err != nil || !slices.Equal(have.IPs, want.IPs[:ips]) {
			t.Errorf("with older policies %t: %+v, %v; want %d addresses", old, have, err, ips)
		}
		old = false
	}
	if have, _, err := b.read(t.Context(), name); err != nil || have.OwnerOf(0) != "east" || have.OwnerOf(1) != "west" {
		t.Errorf("the aggregate is %+v: %v", have, err)
	}
}
