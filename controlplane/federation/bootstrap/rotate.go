package bootstrap

import (
	"context"
	"fmt"
	"time"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/admin"
)

// Rotated is a renewed token.
type Rotated struct {
	Supervisor clusterset.ClusterID `json:"supervisor"` // with the token
	Member     clusterset.ClusterID `json:"member"`     // that accepts it
	Revoked    int                  `json:"revoked"`    // deleted former tokens
}

// Rotate gives each given supervisor a new token for each given member. It stores the new tokens first. Old and new tokens
// are then both valid for overlap, while controllers read the new ones, and after that the old ones are deleted. After an
// earlier error the old tokens stay valid, and a repeated call completes the rotation.
func Rotate(ctx context.Context, namespace string, clusters []Cluster, overlap time.Duration) ([]Rotated, error) {
	s, err := newSurvey(ctx, namespace, clusters)
	if err != nil {
		return nil, err
	}
	type renewal struct {
		supervisor, member *Cluster
		keep               string
	}
	var renewals []renewal
	for _, supervisor := range s.clusters {
		if !supervisor.Supervisor {
			continue
		}
		if !s.supervisors[supervisor.ID] {
			return nil, supervisor.wrap(fmt.Errorf("it is not a supervisor of the given clusters; isthmusctl federation create or add makes it one"))
		}
		for _, member := range s.clusters {
			if _, ok := s.members[member.ID]; !ok {
				return nil, member.wrap(fmt.Errorf("no given supervisor has it as a member; isthmusctl federation add makes it one"))
			}
			secret, token, err := s.ensureToken(ctx, member.Cluster, supervisor.ID, true)
			if err != nil {
				return nil, member.wrap(err)
			}
			if err := s.storeToken(ctx, supervisor.Cluster, member.Cluster, token); err != nil {
				return nil, supervisor.wrap(err)
			}
			renewals = append(renewals, renewal{supervisor.Cluster, member.Cluster, secret.Name})
		}
	}
	if len(renewals) == 0 {
		return nil, fmt.Errorf("no supervisor is given, and only supervisors have tokens; give --supervisor ID=CONTEXT")
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
