package openstack

import (
	"context"

	"github.com/gophercloud/gophercloud/v2/openstack/networking/v2/extensions/quotas"
)

// Quota is how many ports and floating IPs the project has and may have.
type Quota struct {
	Ports, FloatingIPs Use
}

// Use is how many of something there are. A negative limit is none.
type Use struct{ Used, Limit int }

// Quota asks for the project's quota and what is used of it.
func (c *Client) Quota(ctx context.Context) (q Quota, err error) {
	err = c.call(ctx, "read quota", func(ctx context.Context) error {
		is, err := quotas.GetDetail(ctx, c.network, c.project).Extract()
		if err != nil {
			return err
		}
		q = Quota{Ports: useOf(is.Port), FloatingIPs: useOf(is.FloatingIP)}
		return nil
	})
	return q, err
}

func useOf(d quotas.QuotaDetail) Use { return Use{Used: d.Used + d.Reserved, Limit: d.Limit} }
