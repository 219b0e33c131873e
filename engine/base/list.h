/* Intrusive doubly linked list with a sentinel. */

#ifndef ENGINE_BASE_LIST_H
#define ENGINE_BASE_LIST_H

#include <stdbool.h>
#include <stddef.h>

typedef struct list_s list_t;

struct list_s {
    list_t *prev;
    list_t *next;
};

/* The struct that contains the link. */
#define list_entry(link, type, member) \
    ((type *) (void *) ((char *) (link) -offsetof(type, member)))


static inline void
list_init(list_t *head)
{
    head->prev = head;
    head->next = head;
}


static inline bool
list_empty(const list_t *head)
{
    return head->next == head;
}


/* Puts item behind `after`. */
static inline void
list_insert(list_t *after, list_t *item)
{
    item->prev = after;
    item->next = after->next;
    after->next->prev = item;
    after->next = item;
}


static inline void
list_push_front(list_t *head, list_t *item)
{
    list_insert(head, item);
}


static inline void
list_push_back(list_t *head, list_t *item)
{
    list_insert(head->prev, item);
}


/* Unlinks item; it then is an empty list of its own. */
static inline void
list_remove(list_t *item)
{
    item->prev->next = item->next;
    item->next->prev = item->prev;
    list_init(item);
}

#endif /* ENGINE_BASE_LIST_H */
