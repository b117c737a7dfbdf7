package bootstrap

import (
	"context"
	"fmt"
	"time"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/admin"
)

// Rotated is a token that was renewed.
type Rotated struct {
	Supervisor clusterset.ClusterID `json:"supervisor"` // who has it
	Member     clusterset.ClusterID `json:"member"`     // where it is good
	Revoked    int                  `json:"revoked"`    // old ones that are worthless now
}

// Rotate gives supervisors new tokens: each supervisor that was given, for each member that was. The new ones are
// handed out first, then both are good for as long as overlap says, in which controllers take the new ones up, and
// then the old ones are deleted. An error before that leaves them valid, and rotating again finishes it.
func Rotate(ctx context.Context, namespace string, clusters []Cluster, overlap time.Duration) ([]Rotated, error) {
	s, err := look(ctx, namespace, clusters)
	if err != nil {
		return nil, err
	}
	type renewal struct {
		supervisor, member *Cluster
		keep               string
	}
	var renewals []renewal
	for _, supervisor := range s.sites {
		if !supervisor.Supervisor {
			continue
		}
		if !s.supervisors[supervisor.ID] {
			return nil, supervisor.wrap(fmt.Errorf("it is no supervisor of the clusters that were given; isthmusctl federation create or add makes it one"))
		}
		for _, member := range s.sites {
			if _, ok := s.members[member.ID]; !ok {
				return nil, member.wrap(fmt.Errorf("no supervisor that was given has it as a member; isthmusctl federation add makes it one"))
			}
			secret, token, err := s.open(ctx, member.Cluster, supervisor.ID, true)
			if err != nil {
				return nil, member.wrap(err)
			}
			if err := s.hand(ctx, supervisor.Cluster, member.Cluster, token); err != nil {
				return nil, supervisor.wrap(err)
			}
			renewals = append(renewals, renewal{supervisor.Cluster, member.Cluster, secret.Name})
		}
	}
	if len(renewals) == 0 {
		return nil, fmt.Errorf("no supervisor is given, and supervisors have the tokens; give --supervisor ID=CONTEXT")
	}
	select {
	case <-ctx.Done():
		return nil, fmt.Errorf("old tokens are still valid, as are the new ones; rotate again: %w", ctx.Err())
	case <-time.After(overlap):
	}
	var rotated []Rotated
	for _, r := range renewals {
		have, err := tokens(ctx, r.member, namespace, r.supervisor.ID)
		if err != nil {
			return rotated, r.member.wrap(err)
		}
		done := Rotated{Supervisor: r.supervisor.ID, Member: r.member.ID}
		for i := range have {
			if have[i].Name == r.keep {
				continue
			}
			if err := admin.DeleteIfThere(ctx, r.member.Client, &have[i]); err != nil {
				return rotated, r.member.wrap(err)
			}
			done.Revoked++
		}
		rotated = append(rotated, done)
	}
	return rotated, nil
}
