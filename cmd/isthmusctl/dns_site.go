package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// corefileKey is the key of a ConfigMap that holds a Corefile.
const corefileKey = "Corefile"

// site is a place where a cluster's DNS is configured.
type site struct {
	name string // as people call it
	key  client.ObjectKey
	// node says that there is one server a node, which answers for that node.
	node bool
	// must says that it is an error when the ConfigMap is not there.
	must bool
}

// siteNames are the ConfigMaps that a person may name otherwise.
type siteNames struct{ coreDNS, nodeLocal string }

// Where these are in most clusters.
const (
	usualCoreDNS   = "kube-system/coredns"
	usualNodeLocal = "kube-system/node-local-dns"
)

// sites returns those that n means. What a person named must be there.
func (n siteNames) sites() ([]site, error) {
	all := []site{{name: "CoreDNS"}, {name: "NodeLocal DNSCache", node: true}}
	var faults []error
	for i, f := range []struct{ flag, text, usual string }{{"--coredns", n.coreDNS, usualCoreDNS}, {"--node-local-dns", n.nodeLocal, usualNodeLocal}} {
		namespace, name, ok := strings.Cut(f.text, "/")
		key := client.ObjectKey{Namespace: namespace, Name: name}
		if !ok || namespace == "" || name == "" {
			faults = append(faults, fmt.Errorf("%s=%s is not NAMESPACE/NAME of a ConfigMap, such as %s", f.flag, f.text, f.usual))
		}
		all[i].key, all[i].must = key, f.text != f.usual
	}
	return all, errors.Join(faults...)
}

// configured is a site as it stands.
type configured struct {
	site
	config *corev1.ConfigMap
	text   string // of the Corefile
	parts  corefile
}

// String is what the site is called in messages.
func (s site) String() string { return fmt.Sprintf("%s (ConfigMap %s)", s.name, s.key) }

// read returns the site as it stands, nil where there is none.
func (s site) read(ctx context.Context, c client.Client) (*configured, error) {
	is := &configured{site: s, config: &corev1.ConfigMap{}}
	err := c.Get(ctx, s.key, is.config)
	switch {
	case apierrors.IsNotFound(err) && !s.must:
		return nil, nil
	case apierrors.IsNotFound(err):
		return nil, fmt.Errorf("ConfigMap %s does not exist; name the one with the Corefile of %s", s.key, s.name)
	case err != nil:
		return nil, fmt.Errorf("read ConfigMap %s: %w", s.key, err)
	}
	text, ok := is.config.Data[corefileKey]
	if !ok {
		return nil, fmt.Errorf("ConfigMap %s has no key %s; name the one with the Corefile of %s", s.key, corefileKey, s.name)
	}
	is.text = text
	if is.parts, err = parseCorefile(text); err != nil {
		return nil, fmt.Errorf("the Corefile of %s: %w", s, err)
	}
	return is, nil
}

// readSites returns all that are there.
func readSites(ctx context.Context, c client.Client, sites []site) ([]*configured, error) {
	var found []*configured
	for _, s := range sites {
		is, err := s.read(ctx, c)
		if err != nil {
			return nil, err
		}
		if is != nil {
			found = append(found, is)
		}
	}
	if len(found) == 0 {
		return nil, fmt.Errorf("neither ConfigMap %s nor %s exists; name the one with the Corefile of the cluster's DNS by --coredns or --node-local-dns", sites[0].key, sites[1].key)
	}
	return found, nil
}

// edit makes the Corefile of a site from what it is. It is called again when somebody else was faster.
type edit func(is *configured) (want string, err error)

// installing is the edit that adds the stub, or renews it.
func installing(upstreams []string) edit {
	return func(is *configured) (string, error) {
		if err := is.parts.refusal(); err != nil {
			return "", fmt.Errorf("%s: %w", is, err)
		}
		if !is.parts.reloads() {
			return "", fmt.Errorf("%s: its Corefile has no plugin reload, so nobody would read a change; add a line `reload` to a server block, run `kubectl rollout restart` on what runs it, and try again", is)
		}
		s, err := is.parts.stub(upstreams)
		if err != nil {
			return "", fmt.Errorf("%s: %w", is, err)
		}
		return is.parts.with(&s), nil
	}
}

// uninstalling is the edit that takes the stub away.
func uninstalling(is *configured) (string, error) { return is.parts.with(nil), nil }

// apply edits the ConfigMap of a site. What others change at the same time is kept: the edit is made again from that.
func (s site) apply(ctx context.Context, c client.Client, e edit) error {
	return retry.RetryOnConflict(retry.DefaultBackoff, func() error {
		is, err := s.read(ctx, c)
		if err != nil {
			return err
		}
		if is == nil {
			return fmt.Errorf("ConfigMap %s has gone meanwhile", s.key)
		}
		want, err := e(is)
		if err != nil || want == is.text {
			return err
		}
		is.config.Data[corefileKey] = want
		if err := c.Update(ctx, is.config); err != nil { // with the resourceVersion that was read
			return fmt.Errorf("write ConfigMap %s: %w", s.key, err)
		}
		return nil
	})
}

// servers lists the pods that run with the site's Corefile, by node.
func (s site) servers(ctx context.Context, c client.Client) ([]corev1.Pod, error) {
	pods := &corev1.PodList{}
	if err := c.List(ctx, pods, client.InNamespace(s.key.Namespace)); err != nil {
		return nil, fmt.Errorf("list pods in namespace %s: %w", s.key.Namespace, err)
	}
	found := slices.DeleteFunc(pods.Items, func(p corev1.Pod) bool {
		return p.DeletionTimestamp != nil || p.Status.Phase != corev1.PodRunning || !slices.ContainsFunc(p.Spec.Volumes, s.mounts)
	})
	slices.SortFunc(found, func(a, b corev1.Pod) int {
		return strings.Compare(a.Spec.NodeName+" "+a.Name, b.Spec.NodeName+" "+b.Name)
	})
	return found, nil
}

// mounts reports whether a volume is the site's ConfigMap.
func (s site) mounts(v corev1.Volume) bool {
	if v.ConfigMap != nil {
		return v.ConfigMap.Name == s.key.Name
	}
	return v.Projected != nil && slices.ContainsFunc(v.Projected.Sources, func(p corev1.VolumeProjection) bool {
		return p.ConfigMap != nil && p.ConfigMap.Name == s.key.Name
	})
}

// addressesOf returns where a pod answers for clusterset.local by a stub: where its bind says, or at its own address.
func addressesOf(pod corev1.Pod, st stub) []string {
	var all []string
	for _, a := range st.addresses() {
		all = append(all, net.JoinHostPort(a.String(), st.port()))
	}
	if len(all) == 0 && pod.Status.PodIP != "" {
		all = append(all, net.JoinHostPort(pod.Status.PodIP, st.port()))
	}
	return all
}
