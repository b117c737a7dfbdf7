package member

import (
	"fmt"
	"strings"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
)

// mapper looks a kind up when a client first needs it, and keeps only that result. The usual mapper keeps all kinds of all
// groups, 0.8 MiB for each member, and reads them again for each missing kind. Clients of controller-runtime use only
// RESTMapping; the other methods find nothing.
type mapper struct {
	meta.MultiRESTMapper

	server discovery.ServerResourcesInterface

	mu    sync.Mutex
	known map[schema.GroupVersionKind]*meta.RESTMapping
}

func newMapper(server discovery.ServerResourcesInterface) *mapper {
	return &mapper{server: server, known: map[schema.GroupVersionKind]*meta.RESTMapping{}}
}

// RESTMapping is part of meta.RESTMapper. A missing kind is looked up again at the next call.
func (m *mapper) RESTMapping(gk schema.GroupKind, versions ...string) (*meta.RESTMapping, error) {
	for _, version := range versions {
		mapping, err := m.find(gk.WithVersion(version))
		if err == nil || !meta.IsNoMatchError(err) {
			return mapping, err
		}
	}
	return nil, &meta.NoKindMatchError{GroupKind: gk, SearchedVersions: versions}
}

func (m *mapper) find(gvk schema.GroupVersionKind) (*meta.RESTMapping, error) {
	m.mu.Lock()
	found := m.known[gvk]
	m.mu.Unlock()
	if found != nil {
		return found, nil
	}
	missing := &meta.NoKindMatchError{GroupKind: gvk.GroupKind(), SearchedVersions: []string{gvk.Version}}
	list, err := m.server.ServerResourcesForGroupVersion(gvk.GroupVersion().String())
	if apierrors.IsNotFound(err) {
		return nil, missing
	}
	if err != nil {
		return nil, fmt.Errorf("look up the kinds of %s: %w", gvk.GroupVersion(), err)
	}
	for i := range list.APIResources {
		r := &list.APIResources[i]
		if r.Kind != gvk.Kind || strings.Contains(r.Name, "/") { // a subresource
			continue
		}
		found = &meta.RESTMapping{Resource: gvk.GroupVersion().WithResource(r.Name), GroupVersionKind: gvk, Scope: meta.RESTScopeRoot}
		if r.Namespaced {
			found.Scope = meta.RESTScopeNamespace
		}
		m.mu.Lock()
		defer m.mu.Unlock()
		m.known[gvk] = found
		return found, nil
	}
	return nil, missing
}
