/*
 * The protocol of the shared segment as a model for spin: one worker, one
 * engine, SLOTS requests of RECORDS records each.  t/model_ring.t runs it.
 *
 *   submit ring   worker -> engine, operations; the engine sleeps on a
 *                 doorbell that is rung only while its idle flag is set
 *   output rings  engine -> worker, one for each slot; a full one parks the
 *                 request until the worker says that there is room
 *   ready ring    engine -> worker, slots with news; the notified flag keeps
 *                 each slot to one cell
 *
 * Proved: records arrive in order, none is lost or repeated; the rings never
 * overflow; nobody sleeps while there is work for it (that would be an invalid
 * end state).  spin interleaves single steps, as sequentially consistent
 * atomics do; what the product does with weaker ones is said in its comments.
 *
 * Each macro BUG_... takes one step of the protocol away; spin must then find
 * an error, or the model proves nothing:
 *   BUG_NO_RECHECK       the engine sleeps without a second look
 *   BUG_FLAG_FIRST       the worker looks at the idle flag before it pushes
 *   BUG_LATE_CLEAR       the worker lowers notified after it drained
 *   BUG_NO_NOTIFIED      every record pushes a ready cell
 *   BUG_NO_SPACE_RECHECK the engine parks without a second look
 *   BUG_TAIL_FIRST       the worker frees a cell before it has copied it
 */

#ifndef SLOTS
#define SLOTS 2
#endif
#ifndef RECORDS
#define RECORDS 3
#endif

#define OUT_CAP 1            /* records in an output ring */
#define SUBMIT_CAP 8         /* 4 for each slot, as in the product */
#define READY_CAP SLOTS      /* half of the product's */
#define WRAP 16              /* indexes run modulo this, a multiple of caps */
#define START 13             /* so that they do wrap */

#define USED(head, tail) ((head + WRAP - tail) % WRAP)
#define NEXT(x) ((x + 1) % WRAP)

#define OP_SUBMIT 0
#define OP_SPACE 1

typedef ring_t {
    byte head = START;
    byte tail = START;
    byte cell[SUBMIT_CAP]
}

typedef slot_t {
    byte head = START; /* of the output ring */
    byte tail = START;
    byte cell[OUT_CAP];
    bit notified;
    bit want_space
}

ring_t submit;
ring_t ready;
slot_t slot[SLOTS];

bit idle;
bit engine_bell; /* eventfds: several rings are one */
bit worker_bell;

inline push(ring, cap, value)
{
    assert(USED(ring.head, ring.tail) < cap);
    ring.cell[ring.head % cap] = value;
    ring.head = NEXT(ring.head)
}

/* the worker's push, with the doorbell */
inline submit_op(op, s)
{
#ifdef BUG_FLAG_FIRST
    was = idle;
    push(submit, SUBMIT_CAP, op * SLOTS + s);
#else
    push(submit, SUBMIT_CAP, op * SLOTS + s);
    was = idle;
#endif
    if
    :: was -> engine_bell = 1
    :: else
    fi
}

inline exchange(flag, value)
{
    d_step {
        was = flag;
        flag = value
    }
}

inline drain(s)
{
    do
    :: slot[s].head != slot[s].tail ->
#ifdef BUG_TAIL_FIRST
        slot[s].tail = NEXT(slot[s].tail);
        got = slot[s].cell[(slot[s].tail + WRAP - 1) % OUT_CAP];
#else
        got = slot[s].cell[slot[s].tail % OUT_CAP];
        slot[s].tail = NEXT(slot[s].tail);
#endif
        assert(got == expect[s]);
        expect[s]++;
        received++
    :: else -> break
    od
}


active proctype worker()
{
    byte expect[SLOTS];
    byte received;
    byte submitted;
    byte got;
    byte s;
    bit was;

    do
    :: submitted < SLOTS ->
        submit_op(OP_SUBMIT, submitted);
        submitted++

    :: d_step { worker_bell -> worker_bell = 0 };
        do
        :: ready.head != ready.tail ->
            s = ready.cell[ready.tail % READY_CAP];
            ready.tail = NEXT(ready.tail);
#ifdef BUG_LATE_CLEAR
            drain(s);
            exchange(slot[s].notified, 0);
#else
            exchange(slot[s].notified, 0);
            drain(s);
#endif
            exchange(slot[s].want_space, 0);
            if
            :: was -> submit_op(OP_SPACE, s)
            :: else
            fi
        :: else -> break
        od

    :: received == SLOTS * RECORDS -> break
    od
}


/* takes all operations from the submit ring */
inline intake()
{
    do
    :: submit.head != submit.tail ->
        op = submit.cell[submit.tail % SUBMIT_CAP];
        submit.tail = NEXT(submit.tail);
        if
        :: op < SLOTS ->
            assert(!known[op]);
            known[op] = 1;
            runs[op] = 1
        :: else -> runs[op - SLOTS] = 1
        fi
    :: else -> break
    od
}

/* writes one record of slot s, or parks it */
inline emit(s)
{
    blocked = USED(slot[s].head, slot[s].tail) == OUT_CAP;
    if
    :: blocked ->
        exchange(slot[s].want_space, 1);
#ifndef BUG_NO_SPACE_RECHECK
        blocked = USED(slot[s].head, slot[s].tail) == OUT_CAP
#endif
    :: else
    fi;

    if
    :: blocked -> runs[s] = 0
    :: else ->
        slot[s].cell[slot[s].head % OUT_CAP] = sent[s];
        slot[s].head = NEXT(slot[s].head);
        sent[s]++;
#ifdef BUG_NO_NOTIFIED
        was = 0;
#else
        exchange(slot[s].notified, 1);
#endif
        if
        :: !was ->
            push(ready, READY_CAP, s);
            worker_bell = 1
        :: else
        fi
    fi
}

inline doze()
{
    idle = 1;
#ifdef BUG_NO_RECHECK
    blocked = 0;
#else
    blocked = submit.head != submit.tail;
#endif
    if
    :: blocked
    :: else -> d_step { engine_bell -> engine_bell = 0 }
    fi;
    idle = 0
}


active proctype engine()
{
    byte sent[SLOTS];
    bit runs[SLOTS];
    bit known[SLOTS];
    byte op;
    byte i;
    byte done;
    bit blocked;
    bit was;
    bit busy;

    do
    :: done < SLOTS ->
        intake();

        busy = 0;
        done = 0;
        i = 0;
        do
        :: i < SLOTS ->
            if
            :: sent[i] == RECORDS -> done++
            :: else ->
                if
                :: runs[i] ->
                    busy = 1;
                    emit(i)
                :: else
                fi
            fi;
            i++
        :: else -> break
        od;

        if
        :: !busy && done < SLOTS -> doze()
        :: else
        fi
    :: else -> break
    od
}
