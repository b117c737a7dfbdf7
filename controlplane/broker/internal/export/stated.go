package export

import (
	"context"
	"strconv"
	"sync"

	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker/internal/statement"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// stated is what this member has on the broker by its own account, whatever the broker has. Accidents there do not change it. The
// zero value is ready, and safe for concurrent use.
type stated struct {
	mu       sync.Mutex
	services map[clusterset.ServiceName]statement.Statement // of ServiceExports that were handled; zero for one that is not published
	refused  map[clusterset.ServiceName]bool                // Services with endpoints that all other members would ignore
}

// setRefused notes whether a published Service has endpoints that all other members would ignore.
func (s *stated) setRefused(name clusterset.ServiceName, refused bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !refused {
		delete(s.refused, name)
		return
	}
	if s.refused == nil {
		s.refused = map[clusterset.ServiceName]bool{}
	}
	s.refused[name] = true
}

// countRefused returns the number of Services with such endpoints.
func (s *stated) countRefused() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.refused)
}

// published notes that a ServiceExport was published with these slices. After an error nobody knows what the broker has of it.
func (s *stated) published(name clusterset.ServiceName, endpoints []*discoveryv1.EndpointSlice, err error) {
	if err != nil {
		s.forget(name)
		return
	}
	var of statement.Statement
	of.AddExport(name)
	for _, es := range endpoints {
		of.AddSlice(name, es.Name)
	}
	s.put(name, of)
}

// setInvalid notes that a ServiceExport is not published, because it is not valid.
func (s *stated) setInvalid(name clusterset.ServiceName) {
	s.put(name, statement.Statement{})
	s.setRefused(name, false)
}

func (s *stated) put(name clusterset.ServiceName, of statement.Statement) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.services == nil {
		s.services = map[clusterset.ServiceName]statement.Statement{}
	}
	s.services[name] = of
}

// forget notes that there is no ServiceExport, or that what the broker has of it is not known.
func (s *stated) forget(name clusterset.ServiceName) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.services, name)
}

// sum returns the whole statement, and whether it covers all of names.
func (s *stated) sum(names []clusterset.ServiceName) (all statement.Statement, complete bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range names {
		if _, ok := s.services[name]; !ok {
			return all, false
		}
	}
	for _, of := range s.services {
		all.Merge(of)
	}
	return all, true
}

// Statements returns what this member states in its Lease about all its exports. While it does not know, after a start or a
// failure, it states no exports, and the number of refused Services stays as it is.
func (r *Reconciler) Statements() map[string]string {
	exports := r.statement()
	all := map[string]string{v1alpha1.AnnotationExports: exports}
	if exports == "" {
		return all
	}
	all[v1alpha1.AnnotationRefusedServices] = ""
	if n := r.stated.countRefused(); n > 0 {
		all[v1alpha1.AnnotationRefusedServices] = strconv.Itoa(n)
	}
	return all
}

// statement returns the value of AnnotationExports; "" while the member does not know.
func (r *Reconciler) statement() string {
	names, err := r.Source.Exported(context.Background())
	if err != nil { // the cache is not filled yet
		return ""
	}
	all, complete := r.stated.sum(names)
	if !complete {
		return ""
	}
	return all.String()
}
