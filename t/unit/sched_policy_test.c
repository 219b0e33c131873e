/*
 * Who comes in and who has to go, each plan written out by hand: the estimate
 * of outputs, priorities, tenants, the order of victims, reservation.
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "t/unit/sched_rig.h"


/* Who has least to compute again gives way, though it is older; who was hit
 * before is dearer; the first one is spared. */
static void
test_cheapest_victim(void **state)
{
    rig_t rig = rig_create(9, 200, 8);
    seq_t a, b, c, d;

    (void) state;
    rig_add(&rig, &a, 16, 160);
    rig_add(&rig, &b, 32, 160);
    rig_add(&rig, &c, 48, 160);
    rig_step(&rig, 3);
    rig_add(&rig, &d, 48, 160);
    rig_step(&rig, 1);
    assert_int_equal(kv_pool_free_pages(rig.pool), 0);

    a.n_tokens++;
    rig_step(&rig, 1);
    assert_int_equal(b.state, SEQ_WAITING);
    assert_int_equal(kv_pool_free_pages(rig.pool), 1);

    /* the first one ends; b comes back and has 32 tokens, hit once: as dear
     * as 64, so one of 48 goes, the newer */
    rig_drop(&rig, &a);
    rig_step(&rig, 1);
    expect_row(&rig, 0, &b, 0, 32);
    c.n_tokens += 17;
    rig_step(&rig, 1);
    expect_row(&rig, 0, &c, 48, 17);
    assert_int_equal(d.state, SEQ_WAITING);
    assert_int_equal(b.state, SEQ_RUNNING);
    assert_int_equal(b.preemptions, 1);

    rig_drop(&rig, &b);
    rig_drop(&rig, &c);
    rig_drop(&rig, &d);
    rig_destroy(&rig);
}


/* Victims are of the tenant that was served most, and of it the least urgent,
 * before anybody asks what they cost. */
static void
test_victims_by_tenant(void **state)
{
    rig_t rig = rig_create(9, 300, 8);
    seq_t a, b, c, d, e;

    (void) state;
    rig_add_of(&rig, &a, 16, 0, 'a');
    rig_add_of(&rig, &b, 16, 1, 'b');
    rig_add_of(&rig, &c, 48, 2, 'b');
    rig_add_of(&rig, &d, 16, 2, 'b');
    rig_add_of(&rig, &e, 16, 9, 'c'); /* least urgent, but only of its own */
    sched_tenant(rig.sched, "a", 1, 1000);
    rig_step(&rig, 5);
    assert_int_equal(kv_pool_free_pages(rig.pool), 2);

    a.n_tokens += 33; /* three pages */
    rig_step(&rig, 1);
    assert_int_equal(sched_preemptions(rig.sched), 1);
    assert_int_equal(d.state, SEQ_WAITING);

    a.n_tokens += 16; /* one */
    rig_step(&rig, 1);
    assert_int_equal(sched_preemptions(rig.sched), 2);
    assert_int_equal(c.state, SEQ_WAITING);

    a.n_tokens += 48; /* three: two are free */
    rig_step(&rig, 1);
    expect_row(&rig, 0, &a, 65, 48);
    assert_int_equal(sched_preemptions(rig.sched), 3);
    assert_int_equal(b.state, SEQ_WAITING);
    assert_int_equal(e.state, SEQ_RUNNING);

    rig_drop(&rig, &a);
    rig_drop(&rig, &b);
    rig_drop(&rig, &c);
    rig_drop(&rig, &d);
    rig_drop(&rig, &e);
    rig_destroy(&rig);
}


/* Admission leaves room for what the others are expected to generate. */
static void
test_output_estimate(void **state)
{
    static const double ratios[] = { 0.5, -1 };

    (void) state;

    for (int k = 0; k < 2; k++) {
        rig_t rig = rig_with(10, &(sched_conf_t){ .max_tokens = 64,
                                                  .max_seqs = 8,
                                                  .output_ratio = ratios[k] });
        seq_t a, b, c;

        /* 16 tokens, and half of 144: six pages */
        rig_add(&rig, &a, 16, 160);
        rig_add(&rig, &b, 16, 160);
        rig_add(&rig, &c, 16, 160);
        a.cap_tokens = b.cap_tokens = 160;
        c.cap_tokens = 80; /* three */

        if (ratios[k] < 0) {
            rig_step(&rig, 3);
            assert_true(sched_output_ratio(rig.sched) == 0);
        } else {
            rig_step(&rig, 1);
            expect_row(&rig, 0, &a, 0, 16);
            rig_step(&rig, 0); /* c would fit, but b is first */
            assert_true(sched_output_ratio(rig.sched) == 0.5);

            a.n_tokens++;
            rig_step(&rig, 1);
            assert_true(sched_output_ratio(rig.sched) < 0.5);
            rig_drop(&rig, &a);
            rig_step(&rig, 2); /* six and three */
        }

        rig_drop(&rig, &a);
        rig_drop(&rig, &b);
        rig_drop(&rig, &c);
        rig_destroy(&rig);
    }
}


/* What is only expected does not cost a parked sequence its pages; and when
 * nobody runs, the estimate keeps nobody out. */
static void
test_estimate_and_parked(void **state)
{
    rig_t rig = rig_with(
        10,
        &(sched_conf_t){ .max_tokens = 64, .max_seqs = 8, .output_ratio = 1 });
    seq_t a, b, c;

    (void) state;
    rig_add(&rig, &a, 16, 160);
    rig_step(&rig, 1);
    a.parked = true;

    rig_add(&rig, &b, 16, 160);
    b.cap_tokens = 160; /* all ten pages */
    rig_step(&rig, 1);
    expect_row(&rig, 0, &b, 0, 16);
    assert_int_equal(a.state, SEQ_RUNNING);
    rig_drop(&rig, &b);

    rig_add(&rig, &b, 16, 160);
    b.cap_tokens = 96;
    rig_step(&rig, 1);
    rig_add(&rig, &c, 16, 160);
    c.cap_tokens = 64; /* six and four: with a's page they fit */
    rig_step(&rig, 1);
    expect_row(&rig, 0, &c, 0, 16);
    assert_int_equal(a.state, SEQ_RUNNING);

    rig_drop(&rig, &a);
    rig_drop(&rig, &b);
    rig_drop(&rig, &c);
    rig_destroy(&rig);
}


/* Pages run out: nobody comes in, and the ratio rises. */
static void
test_estimate_rises(void **state)
{
    rig_t rig = rig_with(4, &(sched_conf_t){ .max_tokens = 64,
                                             .max_seqs = 8,
                                             .output_ratio = 0.25 });
    seq_t a, b;

    (void) state;
    rig_add(&rig, &a, 32, 64);
    rig_add(&rig, &b, 32, 64);
    rig_step(&rig, 2);
    a.cap_tokens = b.cap_tokens = 64;
    a.n_tokens++;
    b.n_tokens++;
    rig_step(&rig, 1);
    assert_true(sched_output_ratio(rig.sched) > 0.38
                && sched_output_ratio(rig.sched) < 0.39);

    rig_drop(&rig, &a);
    rig_drop(&rig, &b);
    rig_destroy(&rig);
}


/* A more urgent sequence takes the seat of a less urgent one of its tenant:
 * never of an equal one, nor of another tenant. */
static void
test_priority_takes_a_seat(void **state)
{
    rig_t rig = rig_create(100, 64, 3);
    seq_t a, b, c, d, e, f;

    (void) state;
    rig_add_of(&rig, &a, 4, 9, 'x');
    rig_add_of(&rig, &b, 4, 5, 0);
    rig_add_of(&rig, &c, 4, 3, 0);
    rig_step(&rig, 3);
    rig_step(&rig, 0);

    rig_add_of(&rig, &d, 4, 5, 0);
    rig_step(&rig, 0);
    rig_add_of(&rig, &e, 4, 3, 0); /* goes before d, takes b's seat */
    rig_step(&rig, 1);
    expect_row(&rig, 0, &e, 0, 4);
    assert_int_equal(b.state, SEQ_WAITING);

    rig_add_of(&rig, &f, 4, 0, 0); /* the newer one of c and e */
    rig_step(&rig, 1);
    expect_row(&rig, 0, &f, 0, 4);
    assert_int_equal(e.state, SEQ_WAITING);
    assert_int_equal(a.state, SEQ_RUNNING);
    assert_int_equal(a.preemptions, 0);
    assert_true(sched_output_ratio(rig.sched) == 0.1); /* no shortage */

    /* each back in its place: e, b, d */
    rig_drop(&rig, &c);
    rig_step(&rig, 1);
    expect_row(&rig, 0, &e, 0, 4);
    rig_drop(&rig, &f);
    rig_step(&rig, 1);
    expect_row(&rig, 0, &b, 0, 4);

    rig_drop(&rig, &a);
    rig_drop(&rig, &b);
    rig_drop(&rig, &d);
    rig_drop(&rig, &e);
    rig_destroy(&rig);
}


/* The same for pages: the least urgent first, no more than needed, and nobody
 * when it does not help. */
static void
test_priority_takes_pages(void **state)
{
    rig_t rig = rig_create(10, 160, 8);
    seq_t a, b, c, d, e;

    (void) state;
    rig_add_of(&rig, &a, 63, 5, 0);
    rig_add_of(&rig, &b, 16, 7, 0);
    rig_add_of(&rig, &c, 48, 0, 0);
    rig_step(&rig, 3);

    rig_add_of(&rig, &d, 128, 1, 0); /* eight; c holds three of ten */
    rig_step(&rig, 0);
    assert_int_equal(sched_preemptions(rig.sched), 0);
    rig_drop(&rig, &d);

    rig_add_of(&rig, &d, 48, 1, 0); /* three: two are free */
    rig_step(&rig, 1);
    expect_row(&rig, 0, &d, 0, 48);
    assert_int_equal(b.state, SEQ_WAITING);
    assert_int_equal(a.state, SEQ_RUNNING);

    /* a is planned in this step, before e takes its pages: it is not in the
     * plan then */
    rig_add_of(&rig, &e, 16, 1, 0);
    a.n_tokens++;
    rig_step(&rig, 1);
    expect_row(&rig, 0, &e, 0, 16);
    assert_int_equal(a.state, SEQ_WAITING);
    assert_int_equal(a.computed, 0);

    rig_drop(&rig, &a);
    rig_drop(&rig, &b);
    rig_drop(&rig, &c);
    rig_drop(&rig, &d);
    rig_drop(&rig, &e);
    rig_destroy(&rig);
}


/* Long prompts of one tenant do not eat the step before another one, or a more
 * urgent sequence of the same, has had its chance. */
static void
test_prompts_stand_back(void **state)
{
    rig_t rig = rig_create(1000, 100, 8);
    seq_t s[4], a, b;

    (void) state;

    for (int i = 0; i < 4; i++) {
        rig_add_of(&rig, &s[i], 1000, 1, 'n');
    }

    rig_step(&rig, 4);
    expect_row(&rig, 3, &s[3], 0, 25);
    rig_step(&rig, 4);

    rig_add_of(&rig, &a, 10, 0, 'q');
    rig_step(&rig, 5);
    expect_row(&rig, 4, &a, 0, 10);
    expect_row(&rig, 0, &s[0], 50, 25);
    expect_row(&rig, 3, &s[3], 50, 15); /* what is left goes back */

    rig_add_of(&rig, &b, 10, 0, 'n');
    rig_step(&rig, 5);
    expect_row(&rig, 4, &b, 0, 10);

    rig_drop(&rig, &a);
    rig_drop(&rig, &b);

    for (int i = 0; i < 4; i++) {
        rig_drop(&rig, &s[i]);
    }

    rig_destroy(&rig);
}


/* Every sequence books its pages when it comes in: nobody is ever preempted,
 * and few get in. */
static void
test_reserve(void **state)
{
    rig_t rig = rig_with(
        10, &(sched_conf_t){ .max_tokens = 64, .max_seqs = 8, .reserve = 80 });
    seq_t a, b, c;

    (void) state;
    rig_add(&rig, &a, 1, 80);
    rig_add(&rig, &b, 20, 200);
    rig_add(&rig, &c, 1, 16); /* its table has one page */
    a.cap_tokens = b.cap_tokens = 80;
    rig_step(&rig, 2);
    assert_int_equal(a.table.n, 5);
    assert_int_equal(b.table.n, 5);

    for (int i = 0; i < 60; i++) {
        a.n_tokens++;
        b.n_tokens++;
        rig_step(&rig, 2);
    }

    assert_int_equal(a.table.n + b.table.n, 10);
    assert_int_equal(sched_preemptions(rig.sched), 0);
    rig_drop(&rig, &a);
    rig_step(&rig, 1);
    assert_int_equal(c.table.n, 1);

    rig_drop(&rig, &b);
    rig_drop(&rig, &c);
    rig_destroy(&rig);
}


/* One sequence decodes, a prompt of 100 comes: how much of it each step takes,
 * when a row costs a microsecond. */
static void
expect_chunks(double inter_token_ns, int chunk)
{
    cost_t cost = { 0 };
    seq_t a, b;

    cost_observe(&cost, (cost_step_t){ .rows = 1 }, 1); /* does not count */
    cost_observe(&cost, (cost_step_t){ .rows = 1 }, 1000);
    cost_observe(&cost, (cost_step_t){ .rows = 101 }, 101000);

    rig_t rig =
        rig_with(64, &(sched_conf_t){ .max_tokens = 90,
                                      .max_seqs = 8,
                                      .cost = &cost,
                                      .inter_token_ns = inter_token_ns });

    rig_add(&rig, &a, 50, 200);
    rig_step(&rig, 1);
    expect_row(&rig, 0, &a, 0, 50); /* nobody decodes */
    rig_add(&rig, &b, 100, 200);

    for (int done = 0; done < 100; done += chunk) {
        a.n_tokens++;
        rig_step(&rig, 2);
        expect_row(&rig, 0, &a, a.n_tokens - 1, 1);
        expect_row(&rig, 1, &b, done, chunk < 100 - done ? chunk : 100 - done);
    }

    rig_drop(&rig, &a);
    rig_drop(&rig, &b);
    rig_destroy(&rig);
}


static void
test_inter_token_target(void **state)
{
    (void) state;
    expect_chunks(0, 89);     /* no target: what the budget leaves */
    expect_chunks(1e9, 89);   /* more than the budget */
    expect_chunks(21000, 20); /* 21 rows */
    expect_chunks(1, 4);      /* twice a step of decodes is 2 rows, but some
                                 are always allowed */
}


/* A long prompt is in progress, nobody decodes, and a row costs a microsecond:
 * with another prompt coming, it gets what fits beside the other's first
 * token, and no more if that is in the same step. */
static void
test_first_token_beside_long_prompt(void **state)
{
    cost_t cost = { 0 };
    seq_t a, b;

    (void) state;
    cost_observe(&cost, (cost_step_t){ .rows = 1 }, 1); /* does not count */
    cost_observe(&cost, (cost_step_t){ .rows = 1 }, 1000);
    cost_observe(&cost, (cost_step_t){ .rows = 201 }, 201000);

    rig_t rig = rig_with(64, &(sched_conf_t){ .max_tokens = 200,
                                              .max_seqs = 8,
                                              .cost = &cost,
                                              .inter_token_ns = 50000 });

    rig_add(&rig, &a, 800, 900);
    rig_step(&rig, 1);
    expect_row(&rig, 0, &a, 0, 200); /* alone */

    rig_add(&rig, &b, 40, 100);
    rig_step(&rig, 2);
    expect_row(&rig, 0, &a, 200, 50);
    expect_row(&rig, 1, &b, 0, 40);

    b.parked = true; /* neither decodes nor waits */
    rig_step(&rig, 1);
    expect_row(&rig, 0, &a, 250, 200);

    rig_drop(&rig, &a);
    rig_drop(&rig, &b);
    rig_destroy(&rig);
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cheapest_victim),
        cmocka_unit_test(test_victims_by_tenant),
        cmocka_unit_test(test_output_estimate),
        cmocka_unit_test(test_estimate_and_parked),
        cmocka_unit_test(test_estimate_rises),
        cmocka_unit_test(test_priority_takes_a_seat),
        cmocka_unit_test(test_priority_takes_pages),
        cmocka_unit_test(test_prompts_stand_back),
        cmocka_unit_test(test_reserve),
        cmocka_unit_test(test_inter_token_target),
        cmocka_unit_test(test_first_token_beside_long_prompt),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
