package openstack

import (
	"context"

	"github.com/gophercloud/gophercloud/v2/openstack/networking/v2/extensions/quotas"
)

// Quota is the usage and the limit of ports and floating IPs in the project.
type Quota struct {
	Ports, FloatingIPs Use
}

// Use is the usage and the limit of a resource. A negative limit means none.
type Use struct{ Used, Limit int }

// Quota reads the quota of the project.
func (c *Client) Quota(ctx context.Context) (q Quota, err error) {
	err = c.call(ctx, "read quota", func(ctx context.Context, s *session) error {
		is, err := quotas.GetDetail(ctx, s.network, s.project).Extract()
		if err != nil {
			return err
		}
		q = Quota{Ports: useOf(is.Port), FloatingIPs: useOf(is.FloatingIP)}
		return nil
	})
	return q, err
}

func useOf(d quotas.QuotaDetail) Use { return Use{Used: d.Used + d.Reserved, Limit: d.Limit} }
