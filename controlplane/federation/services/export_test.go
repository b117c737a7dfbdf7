package services

// Seen returns how many offers are remembered, each of a cluster and a federated Service.
func (r *Reconciler) Seen() (n int) {
	r.seen.mu.Lock()
	defer r.seen.mu.Unlock()
	for _, clusters := range r.seen.of {
		n += len(clusters)
	}
	return n
}
